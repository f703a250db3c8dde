"""GBNF, as llama.cpp reads it, in Lark."""

import pytest
from random_writing import allows, demo_grammars

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws  # may be empty
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = """
root ::= (sum "=" ws number "\\n")+
sum ::= term ([-+*/] term)*
term ::= number | "(" ws sum ")" ws
number ::= [0-9]+ ws
ws ::= [ \\t\\n]*
"""
# Grammar, texts that it allows, texts that it does not.
CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" | "b"', ["a", "b"], ["c", "ab", ""]),
    ('root ::= [a-z]* "end"', ["end", "bend", "endend", "ennend"], ["en", "END"]),
    ('root ::= . "x"', ["\nx", "éx"], ["x", "xxx"]),
    (r'root ::= "\x41\u0042\U00000043\t\\\"\n\r"', ['ABC\t\\"\n\r'], ["ABC"]),
    (r"root ::= [\x41-\u0043\]/^-]+", ["A]", "B/^-"], ["D", ",", "\\"]),
    (r"root ::= [^\n^]+", ["a-b&&c"], ["a\nb", "a^"]),
    ("root ::= [a&&b~~+--d]+", ["&", "a~b-,+"], ["e", "."]),
    ('root ::= "a"{3} "b"{1,} "c"{0,2} "d"?', ["aaab", "aaabbccd"], ["aab", "aaa", "aaabccc"]),
    ('root ::= ("a" | ) ( | "b") | "c" |', ["", "ab", "a", "b", "c"], ["ac"]),
    ('# one\nroot ::= # two\n  "a" # three\n  x-Y\nx-Y ::= xY | x_y\nxY ::= "1"\nx_y ::= "2"', ["a1", "a2"], ["a"]),
    ('root ::= start start\nstart ::= "x" | "(" root ")"', ["xx", "x(xx)"], ["x", "(x)"]),
    ('root ::= "\U0001f600é$/{}"', ["\U0001f600é$/{}"], ["é"]),
    ('root ::= list\nlist ::= list "," item | item\nitem ::= [0-9]+', ["1", "12,3,45"], ["1,", ",1"]),
    (JSON, ['{"a": [1, 2.5, {"b":\n  "x\\n\\u00e9"}], "c":null}', "{}"], ["[1]", '{"a"}', '{"a":01}']),
    (SUMS, ["1+2=3\n", "(1 *20) -3 = 4 \n\n5=6\n"], ["1+2=3", "1+=3\n"]),
]  # fmt: skip


@pytest.mark.parametrize("gbnf, allowed, refused", CASES)
def test_texts(gbnf: str, allowed: list[str], refused: list[str]) -> None:
    grammar = Grammar.of_text(gbnf)
    assert grammar.kind == "gbnf"
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in refused if allows(grammar, text)] == []


def test_special_tokens() -> None:
    for name in ("<|fim_prefix|>", "<[1502]>"):
        assert allows(Grammar.of_text(f'root ::= {name} "a"'), "<|fim_prefix|>a", special=True)
    assert not allows(Grammar.of_text("root ::= [^a]+"), "<|fim_prefix|>", special=True)


@pytest.mark.parametrize(
    "gbnf, message",
    [
        ('foo ::= "a"', "no rule root"),
        ("root ::= x", "no rule x"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: a second rule root"),
        ('root ::= "a" @', "line 1: cannot read '@'"),
        ('"a" root ::= "a"', "line 1: 'a' before the first rule"),
        ('root ::= "a\\q"', r"line 1: cannot read '\"a"),
        ('root ::= "a', "line 1: cannot read"),
        ('root ::= ("a"', "rule root: a parenthesis is not closed"),
        ('root ::= "a")', r"rule root: \) does not fit"),
        ("root ::= *", r"rule root: \* does not fit"),
        ('root ::= "a"+?', r"rule root: \? does not fit"),
        ("root ::= " + "(" * 200 + ")" * 200, r"rule root: \( does not fit"),
        ("root ::= [b-a]", "gbnf: .*range"),
        ("root ::= []", "cannot read"),
        (r'root ::= "\UFFFFFFFF"', "no character FFFFFFFF"),
        (r"root ::= [\uD800]", "no character D800"),
        ('root ::= "a"' + " " * (1 << 17), "GBNF has 131,084 characters; expected at most 131,072"),
    ],
)
def test_what_is_wrong_is_named(gbnf: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        demo_grammars().open(Grammar("gbnf", gbnf))

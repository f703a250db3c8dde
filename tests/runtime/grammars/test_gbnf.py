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
# Grammar, texts that it allows, texts that it does not.
CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" | "b"', ["a", "b"], ["c", "ab", ""]),
    ('root ::= [a-z]* "end"', ["end", "bend"], ["en", "END"]),
    ('root ::= . "x"', ["éx"], ["x", "xxx"]),
    (r"root ::= [^\n^]+", ["a-b&&c"], ["a\nb", "a^"]),
    ('root ::= "a"{3} "b"{1,} "c"{0,2} "d"?', ["aaab", "aaabbccd"], ["aab", "aaa", "aaabccc"]),
    ('root ::= ("a" | ) ( | "b") | "c" |', ["", "ab", "a", "b", "c"], ["ac"]),
    ('root ::= pair pair\npair ::= "x" | "(" root ")"', ["xx", "x(xx)"], ["x", "(x)"]),
    ('root ::= "\U0001f600é$/{}"', ["\U0001f600é$/{}"], ["é"]),
    ('root ::= list\nlist ::= list "," item | item\nitem ::= [0-9]+', ["1", "12,3,45"], ["1,", ",1"]),
    (JSON, ['{"a": [1, 2.5, {"b":\n  "x\\n\\u00e9"}], "c":null}', "{}"], ["[1]", '{"a"}', '{"a":01}']),
]  # fmt: skip


@pytest.mark.parametrize("gbnf, allowed, refused", CASES)
def test_texts(gbnf: str, allowed: list[str], refused: list[str]) -> None:
    grammar = Grammar.of_text(gbnf)
    assert grammar.kind == "gbnf"
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in refused if allows(grammar, text)] == []


@pytest.mark.parametrize(
    "gbnf, message",
    [
        ('foo ::= "a"', "gbnf: No 'root' rule found; correct the grammar"),
        ("root ::= x", "gbnf: Rule 'x' not found"),
        ('root ::= "a" @', "gbnf: "),
        ('root ::= <|token|> "a"', "gbnf: "),
        ('root ::= "a\\q"', "gbnf: Invalid escape"),
        ('root ::= "a', "gbnf: Unexpected end"),
        ('root ::= ("a"', "gbnf: Expected"),
        ("root ::= " + "(" * 9000, "gbnf: "),
        ("root ::= [b-a]", "gbnf: .*range"),
        ('root ::= "a"' + " " * (1 << 16), "GBNF has 65,548 characters; expected at most 32,768"),
    ],
)
def test_what_is_wrong_is_named(gbnf: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        demo_grammars().open(Grammar("gbnf", gbnf))

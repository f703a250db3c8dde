"""GBNF, the grammars of llama.cpp, written as Lark.

llguidance reads text by lexemes, GBNF by characters. So every rule that cannot reach itself becomes
a lexeme as a whole, in which any text is found that GBNF allows; between lexemes of recursive rules
the longest one counts, so fewer texts may be allowed there, never others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stem_edge.errors import InputError
from stem_edge.text_table import shown

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"[]\\'}
_CHAR = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt\"\[\]\\])|[^\\])"
_TOKEN = re.compile(
    r"(?P<space>\s+|\#[^\r\n]*)|(?P<rule>[\w-]+)\s*::=|(?P<name>[\w-]+)|(?P<special><[^<>\s]+>)"
    rf'|"(?P<text>(?:(?!"){_CHAR})*)"|\[(?P<chars>(?:(?!\]){_CHAR})+)\]'
    r"|(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<sign>[.()|*+?])",
    re.DOTALL,
)
_ONE_CHAR = re.compile(_CHAR, re.DOTALL)


@dataclass(frozen=True)
class _Token:
    kind: str  # name of a group of _TOKEN
    text: str


def lark_of(gbnf: str) -> str:
    """Return a GBNF grammar as Lark. Raises InputError that names what is wrong, and the line."""
    rules = _rules(gbnf)
    recursive = _not_regular(rules)
    names = {
        name: f"rule_{number}" if name in recursive else f"RULE_{number}"
        for number, name in enumerate(rules)
    }
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {' '.join(_lark(body, names))}" for name, body in rules.items()]
    return "\n".join(lines) + "\n"


def _rules(gbnf: str) -> dict[str, list[_Token]]:
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for line, token in _tokens(gbnf):
        if token.kind == "rule":
            if token.text in rules:
                raise InputError(f"GBNF, line {line}: a second rule {token.text}; give it one rule")
            body = rules[token.text] = []
        elif body is None:
            raise InputError(f"GBNF, line {line}: {shown(token.text)} before the first rule")
        else:
            body.append(token)
    named = {token.text for body in rules.values() for token in body if token.kind == "name"}
    missing = sorted(({"root"} | named) - set(rules))
    if missing:
        raise InputError(f"GBNF has no rule {missing[0]}; add it, or correct the name")
    return rules


def _tokens(gbnf: str) -> Iterator[tuple[int, _Token]]:
    """Yield each token and its line."""
    at, line = 0, 1
    while at < len(gbnf):
        found = _TOKEN.match(gbnf, at)
        if found is None:
            rest = gbnf[at : at + 20]
            raise InputError(f"GBNF, line {line}: cannot read {shown(rest)}; correct the grammar")
        kind = found.lastgroup or ""
        if kind != "space":
            yield line, _Token(kind, found[kind])
        line += found[0].count("\n")
        at = found.end()


def _not_regular(rules: Mapping[str, Sequence[_Token]]) -> set[str]:
    """Names of rules that reach a cycle or a special token, which no lexeme can."""
    regular: set[str] = set()
    before = -1
    while len(regular) > before:
        before = len(regular)
        regular |= {
            name
            for name, body in rules.items()
            if all(t.kind != "special" and (t.kind != "name" or t.text in regular) for t in body)
        }
    return set(rules) - regular


def _lark(body: Sequence[_Token], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the tokens of a rule in Lark, which wants a text where GBNF has nothing."""
    opened = True  # nothing yet since the beginning of an alternative
    for token in body:
        if opened and token.text in ("|", ")") and token.kind == "sign":
            yield '""'
        opened = token.kind == "sign" and token.text in ("|", "(")
        match token.kind:
            case "name":
                yield names[token.text]
            case "text":
                yield json.dumps("".join(_chars(token.text)), ensure_ascii=False)
            case "chars":
                yield f"/[{_char_class(token.text)}]/"
            case "sign" if token.text == ".":
                yield "/(?s:.)/"
            case _:  # written alike in both
                yield token.text
    if opened:
        yield '""'


def _chars(text: str) -> Iterator[str]:
    for found in _ONE_CHAR.finditer(text):
        char = found[0]
        if char[0] == "\\":
            char = _ESCAPES[char[1]] if len(char) == 2 else _char_of(char[2:])
        yield char


def _char_of(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise InputError(f"GBNF: there is no character {digits}; expected one of Unicode")
    return chr(code)


def _char_class(text: str) -> str:
    """Return a class for a regular expression, its characters by number: some are signs there."""
    negated = text.startswith("^")
    pieces = _ONE_CHAR.findall(text[negated:])
    places = enumerate(zip(pieces, _chars(text[negated:]), strict=True))
    written = [
        "-" if piece == "-" and 0 < at < len(pieces) - 1 else f"\\x{{{ord(char):X}}}"
        for at, (piece, char) in places
    ]
    return ("^" if negated else "") + "".join(written)

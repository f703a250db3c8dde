"""GBNF, the grammars of llama.cpp, read into trees of rules and written as Lark.

llguidance reads text by lexemes and takes the longest that fits; GBNF reads by characters. So a
grammar without recursion becomes one lexeme, which matches every text that GBNF allows. In others,
lexemes are as long as possible, except for rules that may be empty, mostly white space: these are
read by characters, because a lexeme would swallow what comes next. A grammar with recursion may
allow fewer texts than GBNF, but never others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stem_edge.errors import InputError
from stem_edge.shown import shown

MAX_CHARS = 1 << 17  # comments and long names count, which MAX_LARK does not see
MAX_RULES = 1_000
MAX_DEPTH = 100  # of parentheses
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"[]\\'}
_CHAR = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt\"\[\]\\])|[^\\])"
# Possessive, so that time grows with the length alone.
_TOKEN = re.compile(
    r"(?P<space>\s++|\#[^\r\n]*+)|(?P<rule>[\w-]++)\s*+::=|(?P<name>[\w-]++)|(?P<special><[^<>\s]++>)"
    rf'|"(?P<text>(?:(?!"){_CHAR})*+)"|\[(?P<chars>(?:(?!\]){_CHAR})++)\]'
    r"|(?P<times>[*+?]|\{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?+\})|(?P<sign>[.()|])",
    re.DOTALL,
)
_ONE_CHAR = re.compile(_CHAR, re.DOTALL)


@dataclass(frozen=True)
class Atom:
    """A name of a rule or of a special token, a text, or a regular expression of one character."""

    kind: Literal["name", "special", "text", "regex"]
    text: str


@dataclass(frozen=True)
class Element:
    """Element of a sequence, and how often it stands there: "", or a sign that means the same in Lark."""

    what: Atom | Choice
    times: str = ""


@dataclass(frozen=True)
class Choice:
    """Alternatives: the text follows one of these sequences."""

    sequences: list[list[Element]]


Rules: TypeAlias = dict[str, Choice]
_Tokens: TypeAlias = Iterator[tuple[str, str]]


def read_gbnf(gbnf: str) -> Rules:
    """Return the rules by name, "root" among them. Raises InputError."""
    if len(gbnf) > MAX_CHARS:
        raise InputError(f"GBNF has {len(gbnf):,} characters; expected at most {MAX_CHARS:,}")
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] | None = None
    for line, kind, text in _tokens(gbnf):
        if kind == "rule":
            if text in rules:
                raise InputError(f"GBNF, line {line}: a second rule {text}; give it one rule")
            body = rules[text] = []
        elif body is None:
            raise InputError(f"GBNF, line {line}: {shown(text)} before the first rule")
        else:
            body.append((kind, text))
    if len(rules) > MAX_RULES:
        raise InputError(f"GBNF has {len(rules):,} rules; expected at most {MAX_RULES:,}")
    named = {text for body in rules.values() for kind, text in body if kind == "name"}
    missing = sorted(({"root"} | named) - set(rules))
    if missing:
        raise InputError(f"GBNF has no rule {missing[0]}; add it, or correct the name")
    return {name: _choice(name, iter(body), 0) for name, body in rules.items()}


def _tokens(gbnf: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, kind and text of each token."""
    at, line = 0, 1
    while at < len(gbnf):
        found = _TOKEN.match(gbnf, at)
        if found is None:
            rest = gbnf[at : at + 20]
            raise InputError(f"GBNF, line {line}: cannot read {shown(rest)}; correct the grammar")
        kind = found.lastgroup or ""
        if kind != "space":
            yield line, kind, found[kind]
        line += found[0].count("\n")
        at = found.end()


def _choice(rule: str, tokens: _Tokens, depth: int) -> Choice:
    """Read up to the end, or to the parenthesis that closes."""
    sequences: list[list[Element]] = [[]]
    for kind, text in tokens:
        if kind == "sign" and text == ")" and depth:
            return Choice(sequences)
        if kind == "sign" and text == "|":
            sequences.append([])
        elif kind == "times" and sequences[-1] and not sequences[-1][-1].times:
            sequences[-1][-1] = Element(sequences[-1][-1].what, text)
        elif kind == "sign" and text == "(" and depth < MAX_DEPTH:
            sequences[-1].append(Element(_choice(rule, tokens, depth + 1)))
        elif kind == "times" or (kind == "sign" and text in ("(", ")")):
            raise InputError(f"GBNF, rule {rule}: {text} does not fit there; correct the rule")
        else:
            sequences[-1].append(Element(_atom(kind, text)))
    if depth:
        raise InputError(f"GBNF, rule {rule}: a parenthesis is not closed; close it")
    return Choice(sequences)


def _atom(kind: str, text: str) -> Atom:
    match kind:
        case "name":
            return Atom("name", text)
        case "special":
            return Atom("special", text)
        case "text":
            return Atom("text", "".join(_char(found) for found in _ONE_CHAR.findall(text)))
        case "chars":
            return Atom("regex", f"[{_char_class(text)}]")
    return Atom("regex", "(?s:.)")


def _char(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if len(piece) == 2:
        return _ESCAPES[piece[1]]
    code = int("0x" + piece[2:], 0)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise InputError(f"GBNF: there is no character {piece[2:]}; expected one of Unicode")
    return chr(code)


def _char_class(text: str) -> str:
    """Return a class for a regular expression, its characters by number: some are signs there."""
    negated = text.startswith("^") and len(text) > 1
    pieces, at, written = _ONE_CHAR.findall(text[negated:]), 0, "^" if negated else ""
    while at < len(pieces):
        is_range = pieces[at + 1 : at + 2] == ["-"] and at + 2 < len(pieces)
        ends = (pieces[at], pieces[at + 2]) if is_range else (pieces[at],)
        written += "-".join(f"\\x{{{ord(_char(end)):X}}}" for end in ends)
        at += 3 if is_range else 1
    return written


_MAY_BE_ABSENT = ("*", "?")


def lark_of(gbnf: str) -> str:
    """Return a GBNF grammar as Lark. Raises InputError."""
    return _Writer(read_gbnf(gbnf)).lark()


class _Writer:
    def __init__(self, rules: Rules) -> None:
        self._rules, self._lexemes = rules, list[str]()
        regular = _closure(rules, lambda done, name: _made_of(rules[name], done))
        # Names of rules that may be empty, and that are one lexeme each.
        self._empty = _closure(rules, lambda done, name: _may_be_empty(rules[name], done))
        self._whole = regular if "root" in regular else _closure(
            rules, lambda done, name: name not in self._empty and _made_of(rules[name], done)
        )  # fmt: skip
        self._names = {
            name: f"RULE_{number}" if name in self._whole else f"rule_{number}"
            for number, name in enumerate(rules)
        }

    def lark(self) -> str:
        """Return the text."""
        lines = [f"start: {self._names['root']}"]
        for name, body in self._rules.items():
            written = (
                self._text(body)
                if name in self._whole
                else self._choice(body, name not in self._empty)
            )
            lines.append(f"{self._names[name]}: {written}")
        lexemes = [f"TEXT_{number}: {text}" for number, text in enumerate(self._lexemes)]
        return "\n".join([*lines, *lexemes]) + "\n"

    def _choice(self, choice: Choice, long: bool) -> str:
        """Return a choice outside of lexemes. Its parts become long ones or one for each character."""
        parts = (" ".join(self._parts(items, long)) for items in choice.sequences)
        return " | ".join(part or '""' for part in parts)

    def _parts(self, items: list[Element], long: bool) -> Iterator[str]:
        run: list[Element] = []
        for item in items:
            if long and _made_of(Choice([[item]]), self._whole):
                run.append(item)
                continue
            yield from self._lexeme(run)
            run = []
            inner = item.what
            text = (
                self._text(inner) if isinstance(inner, Atom) else f"({self._choice(inner, long)})"
            )
            yield text + item.times
        yield from self._lexeme(run)

    def _lexeme(self, run: list[Element]) -> Iterator[str]:
        if run:
            yield f"TEXT_{len(self._lexemes)}"
            self._lexemes.append(self._text(Choice([run])))

    def _text(self, what: Atom | Choice) -> str:
        """Return what is inside a lexeme, or a single name."""
        if isinstance(what, Choice):
            sequences = (
                " ".join(
                    f"({self._text(item.what)}){item.times}"
                    if isinstance(item.what, Choice)
                    else self._text(item.what) + item.times
                    for item in items
                )
                for items in what.sequences
            )
            return " | ".join(sequence or '""' for sequence in sequences)
        match what.kind:
            case "name":
                return self._names[what.text]
            case "text":
                return json.dumps(what.text, ensure_ascii=False)
            case "regex":
                return f"/{what.text}/"
            case "special":
                return what.text


def _closure(rules: Rules, holds: Callable[[set[str], str], bool]) -> set[str]:
    """Names of rules with a property that may follow from the same property of other rules."""
    done: set[str] = set()
    names, before = list(rules), -1
    while len(done) > before:
        before = len(done)
        for name in names:
            if name not in done and holds(done, name):
                done.add(name)
        names.reverse()  # so that chains take two rounds, however they are written
    return done


def _made_of(choice: Choice, names: set[str]) -> bool:
    """Whether a choice has no special token, and of rules only these."""
    return all(
        _made_of(item.what, names)
        if isinstance(item.what, Choice)
        else item.what.kind in ("text", "regex") or item.what.text in names
        for items in choice.sequences
        for item in items
    )


def _may_be_empty(choice: Choice, names: set[str]) -> bool:
    """Whether a choice allows the empty text, if these rules do."""
    return any(
        all(
            item.times in _MAY_BE_ABSENT
            or item.times.lstrip("{ ").startswith("0")
            or (
                _may_be_empty(item.what, names)
                if isinstance(item.what, Choice)
                else (item.what.kind == "text" and not item.what.text)
                or (item.what.kind == "name" and item.what.text in names)
            )
            for item in items
        )
        for items in choice.sequences
    )

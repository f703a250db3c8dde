"""GBNF written as Lark.

llguidance reads text by lexemes, of which the longest that fits counts; GBNF reads by characters. So
a grammar without recursion becomes one lexeme, in which any text is found that GBNF allows. In others
lexemes are as long as possible, but for rules that may be empty, mostly white space: these are read by
characters, because a lexeme would swallow what comes next. Fewer texts than GBNF's may be allowed in
grammars with recursion, no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from stem_edge.runtime.grammars.gbnf import Atom, Choice, Item, Rules, read_gbnf

_MAY_BE_ABSENT = ("*", "?")


def lark_of(gbnf: str) -> str:
    """Return a GBNF grammar as Lark. Raises InputError that names what is wrong."""
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
        """Return a choice outside of lexemes, whose parts become long ones or one for each character."""
        parts = (" ".join(self._parts(items, long)) for items in choice.sequences)
        return " | ".join(part or '""' for part in parts)

    def _parts(self, items: list[Item], long: bool) -> Iterator[str]:
        run: list[Item] = []
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

    def _lexeme(self, run: list[Item]) -> Iterator[str]:
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
    """Names of rules for which something holds that may hold because it does for others."""
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

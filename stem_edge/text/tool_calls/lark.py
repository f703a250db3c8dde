"""Rules of a grammar in llguidance's dialect of Lark, and JSON Schemas as such rules.

JSON itself is left to llguidance (%json). What families write instead of it follows a schema's
types, enum, const, properties, required, items, anyOf, oneOf and references inside of the schema, and of
allOf the first; other restrictions, such as minimum or pattern, are not enforced there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stem_edge.errors import InputError
from stem_edge.text.tool_calls.values import AFTER_KEYS

Schema = Mapping[str, Any]
MAX_CHARS = 1 << 20  # of all rules: what a schema defines may be repeated for each argument
# Spaces as templates write JSON, so that models see what they saw in training; oneOf as anyOf.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPTIONS |= {"coerce_one_of": True}
SPECIAL = re.compile(r"<[^<>\s]+>")  # names of tokens that can stand in a grammar
INTEGER = "/-?(0|[1-9][0-9]*)/"
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
KEY = "/[a-zA-Z_][a-zA-Z0-9_]*/"


def literal(text: str) -> str:
    """Return text as it is written in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def referred(root: Schema, reference: str) -> object:
    """Return the schema that a reference inside a schema points to; None if it points nowhere."""
    schema: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


class RuleNames:
    """Rules of a grammar, each with a name of its own; special: names that are special tokens."""

    def __init__(self, special: Collection[str] = ()) -> None:
        self._special = special
        self._bodies = dict[str, str]()  # by name
        self._names = dict[str, str]()  # by body
        self._size = 0

    def add(self, body: str) -> str:
        """Return the name of the rule with this body."""
        if body not in self._names:
            self.define(self.reserve(), body)
        return self._names[body]

    def reserve(self) -> str:
        """Return a name for a rule whose body comes later, by define."""
        name = f"rule{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give a reserved name its body. Raises InputError if all bodies are too long together."""
        self._size += len(body)
        if self._size > MAX_CHARS:
            raise InputError(
                f"the grammar of calls of these tools has more than {MAX_CHARS:,} characters; give "
                "fewer tools, or simpler parameters"
            )
        self._bodies[name] = body
        self._names.setdefault(body, name)

    def lazy(self, regex: str) -> str:
        """Return the name of a rule that matches as little as it can."""
        return self.add(f"[lazy] {regex}")

    def mark(self, text: str) -> str:
        """Return a marker: a special token, or else text; empty for an empty marker."""
        if text in self._special and SPECIAL.fullmatch(text):
            return text
        return literal(text) if text else ""

    def is_special(self, text: str) -> bool:
        """Return whether a marker is a special token."""
        return self.mark(text) == text != ""

    def json(self, schema: Schema) -> str:
        """Return the name of a rule for JSON by a schema."""
        return self.add(f"%json {json.dumps({**schema, 'x-guidance': OPTIONS})}")

    def text(self, start: str) -> str:
        """Return the grammar."""
        lines = [f"start: {start}"]
        for name, body in self._bodies.items():
            lazy = body.startswith("[lazy] ")
            lines.append(f"{name}[lazy]: {body[7:]}" if lazy else f"{name}: {body}")
        return "\n".join(lines) + "\n"


class Values:
    """Rules for values as Gemma writes them, by a schema and those that it refers to.

    quote: the marker around texts.
    """

    def __init__(self, rules: RuleNames, quote: str, root: Schema) -> None:
        self._rules, self._quote, self._root = rules, quote, root
        self._known = dict[str, str]()  # names of rules by reference, "" for any value
        self._made = dict[int, str]()  # names of rules by the id of a part of the root

    def value(self, schema: object) -> str:
        """Return the name of a rule for a value; schema: a part of the root, or None."""
        if id(schema) not in self._made:  # references to one schema can be written in many ways
            self._made[id(schema)] = self._value(schema)
        return self._made[id(schema)]

    def _value(self, schema: object) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return self._rules.add(" | ".join(map(self._written, values)))
        if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf", ())[:1]:
            return self._rules.add(" | ".join(map(self.value, choices)))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            each = dict.fromkeys(map(str, kinds))  # once each: nested lists would multiply
            return self._rules.add(" | ".join(self._of_type(kind, schema) for kind in each))
        return self._of_type(str(kinds or ("object" if "properties" in schema else "")), schema)

    def members(self, schema: Schema) -> str:
        """Return the name of a rule for the members of an object, in the order of the schema."""
        properties, required = schema.get("properties"), schema.get("required", ())
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties") is False:
                return ""
            return self._listed(f'{KEY} ":" {self._any()}', "*")
        each = [
            (f"{_key(name)} {self.value(properties[name])}", name in required)
            for name in sorted(properties)
        ]
        return self._in_order(each)

    def _in_order(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return the name of a rule for members with commas between those that are there."""
        comma = literal(",")
        first, rest = list[str](), ""
        for member, required in reversed(members):
            begins = self._rules.add(f"{member} {rest}".strip())
            first = [begins] if required else [begins, *first]
            rest = self._rules.add(f"({comma} {member}){'' if required else '?'} {rest}".strip())
        some = " | ".join(first)
        return self._rules.add(some if any(required for _, required in members) else f"({some})?")

    def _listed(self, item: str, times: str) -> str:
        comma = literal(",")
        return self._rules.add(f"({item} ({comma} {item}){times})?")

    def _of_type(self, kind: str, schema: Schema) -> str:
        match kind:
            case "string":
                return self._text()
            case "integer":
                return self._rules.add(INTEGER)
            case "number":
                return self._rules.add(NUMBER)
            case "boolean":
                return self._rules.add(f"{self._written(True)} | {self._written(False)}")
            case "null":
                return self._rules.add(self._written(None))
            case "array":
                return self._rules.add(
                    f'"[" {self._listed(self.value(schema.get("items")), "*")} "]"'
                )
            case "object":
                return self._rules.add(f'"{{" {self.members(schema)} "}}"')
        return self._any()

    def _text(self) -> str:
        quote = self._quote
        end = re.escape(quote).replace("/", r"\/")
        if not self._rules.is_special(quote):
            lazy = self._rules.lazy(f"/(?s:.*){end}/")
            return self._rules.add(f"{literal(quote)} {lazy}")
        return self._rules.add(f"{quote} /(?s:.*)/ {quote}")

    def _written(self, value: object) -> str:
        """Return the Lark of a value that is given."""
        comma = literal(",")
        if isinstance(value, str):
            quote = self._rules.mark(self._quote)
            return f"{quote} {literal(value) if value else ''} {quote}"
        if isinstance(value, list):
            return f'"[" {f" {comma} ".join(map(self._written, value))} "]"'
        if isinstance(value, Mapping):
            pairs = [f"{_key(k)} {self._written(v)}" for k, v in value.items()]
            return f'"{{" {f" {comma} ".join(pairs)} "}}"'
        return literal(json.dumps(value))

    def _reference(self, reference: str) -> str:
        if reference not in self._known:
            self._known[reference] = name = self._rules.reserve()
            self._rules.define(name, self.value(referred(self._root, reference)))
        return self._known[reference]

    def _any(self) -> str:
        if "" not in self._known:
            self._known[""] = name = self._rules.reserve()
            kinds = ("string", "number", "boolean", "null", "array", "object")
            self._rules.define(name, " | ".join(self._of_type(kind, {}) for kind in kinds))
        return self._known[""]


def _key(name: str) -> str:
    """Return the Lark of a key, in quotes if it would not be read as one without."""
    return literal((literal(name) if AFTER_KEYS.intersection(name) else name) + ":")

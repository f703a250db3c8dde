"""What is written under a JSON Schema is valid, and what cannot be enforced is refused."""

import ipaddress
import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from random_writing import allows, demo_grammars, write

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar

SUITE = Path(__file__).parents[2] / "data/json_schemas/schemas.jsonl"
JUDGES = {
    "2020-12": jsonschema.Draft202012Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "7": jsonschema.Draft7Validator,
    "6": jsonschema.Draft6Validator,
    "4": jsonschema.Draft4Validator,
}


# What these stand for in the schemas' regular expressions, which are those of ECMAScript.
CLASSES = {
    r"\\w": "[A-Za-z0-9_]", r"\\W": "[^A-Za-z0-9_]", r"\\d": "[0-9]", r"\\D": "[^0-9]",
    r"\\p{Letter}": r"[^\\W\\d_]", r"\\p{digit}": r"\\d",
}  # fmt: skip


def suite_cases(each: int) -> Iterator[tuple[str, str]]:
    """Yield a draft and a schema, for every `each`-th line of the suite."""
    for line in SUITE.read_text().splitlines()[::each]:
        case = json.loads(line)
        for draft in case["drafts"].split():
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": JUDGES[draft].META_SCHEMA["$schema"]} | schema
            yield draft, json.dumps(schema)


def faults(draft: str, schema: str, text: str) -> list[str]:
    """What is wrong with a text. Decimals, because 0.3 is no multiple of 0.1 in floats."""
    schema = re.sub(r"\\\\(?:p\{\w+\}|[wWdD])", lambda found: CLASSES[found[0]], schema)
    judge = JUDGES[draft](json.loads(schema, parse_float=Decimal))
    return [error.message for error in judge.iter_errors(json.loads(text, parse_float=Decimal))]


def check_suite(each: int, seeds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for draft, schema in suite_cases(each):
        counts["schemas"] += 1
        try:
            demo_grammars().open(Grammar.of_schema(schema))
        except InputError:
            counts["refused"] += 1
            continue
        for seed in range(seeds):
            text = write(demo_grammars().open(Grammar.of_schema(schema)), seed)
            counts["texts" if text is not None else "unfinished"] += 1
            assert text is None or not faults(draft, schema, text), (draft, schema, text)
    return counts


def test_a_sample_of_the_suite() -> None:
    counts = check_suite(each=12, seeds=1)
    assert counts["texts"] > 50 and counts["unfinished"] < 3


@pytest.mark.slow
def test_the_suite() -> None:
    """1,544 schemas of five drafts, of which more than half can be enforced."""
    counts = check_suite(each=1, seeds=5)
    assert counts["schemas"] == 1544 and counts["refused"] < 750, counts
    assert counts["unfinished"] < counts["texts"] / 100, counts


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ({"items": {"format": "iri"}}, "format: iri"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable|minimum"),
    ({"multipleOf": 1234567}, "multipleOf 1234567 takes too long"),
    ({"allOf": [{"multipleOf": 97}, {"multipleOf": 0.0101}, {"multipleOf": 103}]}, "0.0101|103"),
    ({"pattern": "[ab]?" * 4000}, "a pattern has more than"),
    ({"patternProperties": {f"^p{n}x": {} for n in range(400)}}, "patternProperties are too many"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
    ({"required": ["a"], "minProperties": 3}, "minProperties 3 is more than one"),
    ({"items": {"minProperties": 2}}, "minProperties 2 is"),
    (False, "false"),
    ({"properties": {f"p{number}": {"type": "string"} for number in range(5_000)}}, "too big"),
    ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
    ({"type": 3}, "type"),
]  # fmt: skip


@pytest.mark.parametrize("schema, message", REFUSED)
def test_what_cannot_be_enforced_is_refused(schema: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        demo_grammars().open(Grammar.of_schema(schema))


OBJECT = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"items": {"type": "boolean"}}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "text, allowed",
    [
        ('{"a":1}', True), ('{"a": 1, "b": [true, false]}', True), ('{"b":[],"a":1}', False),
        ('{\n  "a": 1,\n  "b": [\n    true\n  ]\n}', True), ('{"a" : 1}', True), ("{ }", False),
        ('{"a":  1}', False), ('{"a":\n\n1}', False), (' {"a":1}', False), ('{"a":1}\n', False),
    ],
)  # fmt: skip
def test_whitespace_is_bounded(text: str, allowed: bool) -> None:
    assert allows(Grammar.of_schema(OBJECT), text) == allowed


FORMATS: dict[str, Callable[[str], object]] = {
    "date": lambda text: re.fullmatch("[0-9]{4}(-[0-9]{2}){2}", text) or 1 / 0,
    "email": lambda text: text.index("@"),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    grammar = Grammar.of_schema({"type": "string", "format": name})
    texts = [write(demo_grammars().open(grammar), seed) for seed in range(20)]
    written = [json.loads(text) for text in texts if text is not None]
    assert written
    for text in written:
        FORMATS[name](text)

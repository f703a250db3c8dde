"""Grammars of required calls: llguidance takes them, and what they allow can be read."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from tool_families import BY_NAME, TOOLS, WEATHER, read, with_markers

import stem_edge
from stem_edge.text.messages import checked_tools
from stem_edge.text.tool_calls.grammar import calls_grammar
from stem_edge.text.tool_calls.parser import Call

llguidance = pytest.importorskip("llguidance")
DEMO = Path(stem_edge.__file__).parent / "demo_model" / "tokenizer.json"
END = 1501
MARKERS = sorted({mark for family in BY_NAME.values() for mark in family.markers if mark})


@cache
def tokenizer(special: bool) -> tuple[Any, Any]:
    """Return the demo's tokenizer for llguidance and for us; special: markers are its tokens."""
    told = json.loads(DEMO.read_text())
    spare = [t for t in told["added_tokens"] if t["id"] > END]
    for token, mark in zip(spare, MARKERS if special else (), strict=False):
        token["content"] = mark
    assert len(spare) >= len(MARKERS)
    text = json.dumps(told)
    return llguidance.LLTokenizer(text, eos_token=END), tokenizers.Tokenizer.from_str(text)


def answers(grammar: str, special: bool, count: int) -> Iterator[str]:
    """Yield answers at random of those that are allowed, ended as soon as that is."""
    judge, codec = tokenizer(special)
    closing = {
        i for i in range(codec.get_vocab_size()) if set(codec.id_to_token(i)) & set(']})"\n>')
    }
    for seed in range(count):
        chance, ids = random.Random(seed), list[int]()
        matcher = llguidance.LLMatcher(judge, grammar, log_level=0)
        while len(ids) < 300:
            bias = matcher.compute_logit_bias()
            allowed = [i for i, on in enumerate(bias) if on and i != END]
            if matcher.is_accepting() and (not allowed or chance.random() < 0.5 or len(ids) > 100):
                yield codec.decode(ids, skip_special_tokens=False)
                break
            assert allowed, matcher.get_error()
            if chance.random() < 0.2 and (end := _end_of_text(matcher, codec)):
                ids += end
                assert matcher.consume_tokens(end), matcher.get_error()
                continue
            rather = [i for i in allowed if i in closing]
            ids.append(chance.choice(rather if rather and chance.random() < 0.5 else allowed))
            assert matcher.consume_token(ids[-1]), matcher.get_error()


def _end_of_text(matcher: Any, codec: Any) -> list[int]:
    """Return what ends a text that chance alone would hardly end, if it can come now."""
    for end in ('<|"|>', "<escape>"):
        ids: list[int] = codec.encode(end, add_special_tokens=False).ids
        if matcher.validate_tokens(ids) == len(ids):
            return ids
    return []


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_is_allowed_can_be_read(name: str, special: bool, parallel: bool) -> None:
    family = with_markers(name, special=special)
    grammar = calls_grammar(family, TOOLS, parallel=parallel)
    assert llguidance.LLMatcher.validate_grammar(grammar, tokenizer(special)[0]) == ""
    counts = set()
    for text in answers(grammar, special, 6):
        pieces = read(family, text)
        for call in pieces:
            assert isinstance(call, Call), text
            schema = WEATHER if call.name == "weather" else {"maxProperties": 0}
            arguments = json.loads(call.arguments)
            if family.quote:
                arguments.pop("parts", None)  # references are not followed there
            jsonschema.validate(arguments, schema)
        counts.add(len(pieces))
    assert counts and (parallel or counts == {1})
    assert not parallel or not special or max(counts) > 1


def allows(grammar: str, text: str) -> bool:
    judge, codec = tokenizer(False)
    matcher = llguidance.LLMatcher(judge, grammar, log_level=0)
    ids = codec.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


WRITTEN = {
    "gemma4": "<|tool_call>call:{}{{{}}}<tool_call|>",
    "functiongemma": "<start_function_call>call:{}{{{}}}<end_function_call>",
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {{{}}}}}\n</tool_call>',
    "llama3": '{{"name": "{}", "parameters": {{{}}}}}',
}
EACH = {  # an argument, for each form: a text, a number, a choice, an object
    "gemma4": ('city:<|"|>é "x"<|"|>', "days:3", 'unit:<|"|>C<|"|>', "deep:{x:1.5,y:null}"),
    "functiongemma": ("city:<escape>é<escape>", "days:3", "unit:<escape>C<escape>", "deep:{x:-1}"),
    "hermes": ('"city": "é"', '"days": 3', '"unit": "C"', '"deep": {"x": 1, "y": false}'),
}
EACH |= {"llama3": EACH["hermes"]}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_a_schema_allows(name: str) -> None:
    family = with_markers(name, special=False)
    grammar = calls_grammar(family, TOOLS, name="weather")
    city, days, unit, deep = EACH[name]
    comma = "," if "gemma" in name else ", "

    def allowed(*arguments: str, called: str = "weather") -> bool:
        return allows(grammar, WRITTEN[name].format(called, comma.join(arguments)))

    in_order = "gemma" in name  # they sort names
    assert allowed(city, deep) and allowed(
        city, days, *((deep, unit) if in_order else (unit, deep))
    )
    assert not allowed(city) and not allowed(deep)  # both are required
    assert not allowed(city, days.replace("3", "three"), deep)
    assert not allowed(city, *((deep, unit) if in_order else (unit, deep)), called="now")
    wrong = unit.replace("C", "K")
    assert not allowed(city, *((deep, wrong) if in_order else (wrong, deep)))
    now = calls_grammar(family, TOOLS, name="now")
    assert allows(now, WRITTEN[name].format("now", "")) and not allows(now, "now")
    assert not allows(now, WRITTEN[name].format("now", city))


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_schemas_that_are_odd(name: str) -> None:
    def grammar(parameters: dict[str, Any]) -> str:
        function = {"name": "now", "parameters": parameters}
        tools = checked_tools([{"type": "function", "function": function}])
        assert tools is not None
        return calls_grammar(BY_NAME[name], tools)

    odd: list[dict[str, Any]] = [
        {},
        {"type": "object"},
        {"properties": {"a": {"const": 'x"\\\n/é😀'}, "b": {"enum": [1, None, True, {"c": [""]}]}}},
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "array"}]}}},
        {"properties": {"b": {"items": {}, "minLength": 1}}},
        {"properties": {"a b": {"type": "null"}, "é:": {"const": {"=": 1}}}, "required": ["é:"]},
        {"oneOf": [{"type": "object", "properties": {"a": {"type": "null"}}}]},
        {"properties": {"a": {"allOf": [{"$ref": "#/definitions/b"}]}},
         "definitions": {"b": {"type": "object", "properties": {"c": {"type": "null"}}}}},
    ]  # fmt: skip
    for parameters in odd:
        text = grammar(parameters)
        assert llguidance.LLMatcher.validate_grammar(text, tokenizer(False)[0]) == "", text
        for one in answers(text, False, 2):
            assert all(isinstance(each, Call) for each in read(BY_NAME[name], one))
    end = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
    text = grammar({"$ref": "#/$defs/e", "$defs": {"e": end, "b": {"enum": ["x", 'y"']}}})
    if "gemma" not in name:
        for one in answers(text, False, 3):
            (call,) = read(BY_NAME[name], one)
            assert isinstance(call, Call) and json.loads(call.arguments)["a"] in ("x", 'y"')


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(12):
    NESTED = {"type": ["array", "array", "object"], "items": NESTED, "properties": {"x": NESTED}}
WIDE = {"properties": {f"p{number}": {"type": "integer"} for number in range(3000)}}


@pytest.mark.parametrize(
    "properties",
    [
        {"a": NESTED},
        {f"a{n}": {"$ref": f"{n}/$defs/wide"} for n in range(1000)},
        {"a": {"$ref": "#/$defs/d0"}},
    ],
)
def test_large_grammars_are_made_soon(properties: dict[str, Any]) -> None:
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(999)}
    parameters = {"type": "object", "properties": properties, "$defs": chain | {"wide": WIDE}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    began = time.thread_time()
    for name in ("gemma4", "hermes"):  # the others are made as one of these is
        assert calls_grammar(BY_NAME[name], tools)
    assert time.thread_time() - began < 20  # minutes if anything was made repeatedly

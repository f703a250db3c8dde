"""Answers with calls, whole, in parts, and broken."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_families import BY_NAME, TOOLS, call, read

from stem_edge.text.tool_calls.parser import Call, CallParser
from stem_edge.text.tool_calls.reading import read_call

TEXTS: list[tuple[str, str, list[str | Call]]] = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [call(0, "now", "{}")]),
    ("hermes", '<tool_call>{"arguments":{"a":1 , "b":[]},"name":"now"}</tool_call>',
     [call(0, "now", '{"a": 1, "b": []}')]),
    ("hermes", '<tool_call>{"name": "now"}', [call(0, "now", "{}")]),
    ("hermes", 'Hi.\n\n<tool_call>{"name":"now","arguments":{}}</tool_call>\nBye. ',
     ["Hi.", call(0, "now", "{}"), "\nBye. "]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}\n<tool_call>{"name":"now","arguments":{}}',
     [call(0, "now", "{}"), call(1, "now", "{}")]),
    ("hermes", '<tool_call>{"type": "function", "id": "3", "name":"now","arguments":{"a": True}}',
     [call(0, "now", '{"a": true}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\\'\\d\t", "b": [.5, 1,],}}',
     [call(0, "now", '{"a": "\'\\\\d\\t", "b": [0.5, 1]}')]),
    ("hermes", '<tool_call>{"name":"now","arguments":{"\\ud800": "\\ud800"}}',
     [call(0, "now", '{"\\ud800": "\\ud800"}')]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [call(0, "now", "{}")]),
    ("llama3", ' {"name": "now", "parameters": {}};\n{"name": "now", "arguments": {"a": true}}',
     [call(0, "now", "{}"), call(1, "now", '{"a": true}')]),
    ("gemma4", '<|tool_call>call:now{a:<|"|>"x" <|"|>,b_c:{<|"|>d<|"|>:[1,null]},e:false}<tool_call|>',
     [call(0, "now", '{"a": "\\"x\\" ", "b_c": {"d": [1, null]}, "e": false}')]),
    ("gemma4", '<|tool_call>call:now{a: "x"}<tool_call|><|tool_call>call:now{}<tool_call|>',
     [call(0, "now", '{"a": "x"}'), call(1, "now", "{}")]),
]  # fmt: skip
BROKEN: list[tuple[str, str]] = [
    ("hermes", '<tool_call>{"name": "n'), ("hermes", "<tool_call>oops <tool_call"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "3"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a" 1}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "more": {}}</tool_call>'),
    ("hermes", '<tool_call>{"a": ' + "[" * 99 + "]" * 99 + "}</tool_call>"),
    ("hermes", '{"name": "now", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": no}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\u12g4"}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, 3}'),
    ("llama3", '{"answer": 42}'), ("llama3", 'So: {"name": "now", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(3)"), ("llama3", "{name}"),
    ("gemma4", "<|tool_call>call:now(a)<tool_call|>"), ("gemma4", "call:now{}"),
    ("gemma4", "<|tool_call>call:{}"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "pieces"), TEXTS)
def test_answers_with_calls(family: str, text: str, pieces: list[str | Call]) -> None:
    assert read(BY_NAME[family], text) == pieces
    assert str(pieces).encode()  # can be sent


@pytest.mark.parametrize(("family", "text"), BROKEN)
def test_what_is_broken_is_text(family: str, text: str) -> None:
    assert read(BY_NAME[family], text) == [text]


@pytest.mark.parametrize(("family", "text"), [*(each[:2] for each in TEXTS), *BROKEN])
def test_every_split_and_every_end_is_the_same(family: str, text: str) -> None:
    whole = read(BY_NAME[family], text)
    assert read(BY_NAME[family], *text) == whole
    for at in range(len(text)):
        assert read(BY_NAME[family], text[:at], text[at:]) == whole
        cut = read(BY_NAME[family], text[:at])
        assert cut == read(BY_NAME[family], *text[:at])
        for piece in cut:  # what a call says can be read
            assert isinstance(piece, str) or json.loads(piece.arguments) is not None


MARKS = sorted({mark for text in TEXTS for mark in (text[1][:9], text[1][-9:], text[1][9:18])})
PARTS = st.lists(
    st.sampled_from([*MARKS, " ", "\n", "{", "[", '"', "now", "(", "é", "<"]), max_size=8
)


@given(st.sampled_from(sorted(BY_NAME)), PARTS, st.data())
def test_no_text_is_lost(family: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    pieces = read(BY_NAME[family], text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(BY_NAME[family], *deltas) == pieces
    if not any(isinstance(piece, Call) for piece in pieces):
        assert pieces == ([text] if text else [])


def test_a_call_is_not_read_again_at_each_brace(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Mock(wraps=read_call)
    monkeypatch.setattr("stem_edge.text.tool_calls.parser.read_call", reads)
    for name, begin in (
        ("hermes", '{"arguments": {"a": "}}}}", "b": ['),
        ("gemma4", 'call:now{a:<|"|>}}<|"|>,b:['),
    ):
        answer = CallParser(BY_NAME[name], TOOLS)
        assert not any(map(answer.push, (BY_NAME[name].begin + begin, *["{}, "] * 500)))
    assert reads.call_count < 99


def test_pieces_come_as_soon_as_they_can() -> None:
    parser = CallParser(BY_NAME["hermes"], TOOLS)
    assert parser.push("Yes <tool") == ["Yes"]
    assert parser.push('bar> <tool_call>{"name": "now", ') == [" <toolbar>"]
    assert parser.push('"arguments": {"a": "b}') == parser.push('c"}}\n</tool') == []
    (whole,) = parser.push("_call>")
    assert isinstance(whole, Call) and whole.id.startswith("call_") and len(whole.id) == 29
    assert parser.push("", ended=True) == []
    assert CallParser(BY_NAME["llama3"], TOOLS).push("{ no") == ["{ no"]


@pytest.mark.parametrize(
    "schema", [{"enum": 5}, {"enum": {"x": 1}}, {"type": {}}, {"const": []}, 5]
)
def test_schemas_that_nobody_checked(schema: object) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    assert read(BY_NAME["hermes"], text, tools=tools) == [call(0, "f", '{"a": "x"}')]

"""Answers that grow, and the events that make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stem_edge.answers.anthropic.message import AnswerMessage
from stem_edge.answers.events import End, Text, Thought
from stem_edge.answers.growing import Growing, Told
from stem_edge.answers.openai.responses_answer import AnswerItems
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd

PIECES = [
    Thought("Hm", 2),
    Thought("m.", 3),
    Text("Hel"),
    Text("lo"),
    CallBegin(0, "c1", "weather"),
    CallArguments(0, '{"a":'),
    CallArguments(0, "1}"),
    CallEnd(0),
    CallBegin(1, "c2", "time"),
    CallEnd(1),
    Text("!"),
]


def answer(growing: Growing, *pieces: Any) -> tuple[dict[str, Any], list[Told]]:
    """Return the answer of pieces, and its events without the two that begin a message."""
    request: Any = SimpleNamespace(prompt_tokens=10, cached_tokens=4, new_tokens=3)
    events = [told for piece in pieces for told in growing.add(piece, request)]
    return growing.whole, events[2:]


def test_blocks_open_grow_and_close_in_order() -> None:
    _, events = answer(AnswerMessage("m"), *PIECES, End("tool_calls", None))
    told = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    assert told == [
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2),
        ("start", 3), ("stop", 3),
        ("start", 4), ("delta", 4), ("stop", 4),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_whole_message_has_what_the_events_told() -> None:
    whole, _ = answer(AnswerMessage("m"), *PIECES, End("stop", "END"))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
        {"type": "text", "text": "!"},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10


def test_empty_answer_has_an_empty_text() -> None:
    whole, events = answer(AnswerMessage("m"), End("length", None))
    assert [event["type"] for event in events[:2]] == ["content_block_start", "content_block_stop"]
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert whole["stop_reason"] == "max_tokens"


def test_a_call_that_breaks_off() -> None:
    """Arguments that are no JSON are kept, and an item is not completed."""
    pieces = CallBegin(0, "c1", "weather"), CallArguments(0, '{"a": tr'), End("stop", None)
    whole, _ = answer(AnswerMessage("m"), *pieces)
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"a": tr'}
    whole, _ = answer(AnswerItems({}), *pieces)
    assert [item["status"] for item in whole["output"]] == ["incomplete"]

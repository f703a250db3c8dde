"""Answers as messages of blocks, and the events that make them."""

from __future__ import annotations

from stem_edge.answers.anthropic.message import AnswerMessage, Event, usage_of

USAGE = usage_of(10, 4, 3)


def pushed(message: AnswerMessage) -> list[Event]:
    """Text, two calls, more text."""
    return [
        *message.text("Hel"),
        *message.text("lo"),
        *message.call("c1", "weather"),
        *message.arguments('{"a":'),
        *message.arguments("1}"),
        *message.stop(),
        *message.call("c2", "time"),
        *message.stop(),
        *message.text("!"),
    ]


def test_blocks_open_grow_and_close_in_order() -> None:
    message = AnswerMessage("m")
    events = [*pushed(message), *message.end("tool_calls", None, USAGE)]
    told = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    assert told == [
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("stop", 2),
        ("start", 3), ("delta", 3), ("stop", 3),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_whole_message_has_what_the_events_told() -> None:
    message = AnswerMessage("m")
    pushed(message)
    whole = message.whole("stop", "END", USAGE)
    assert whole["content"] == [
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
        {"type": "text", "text": "!"},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10


def test_empty_answer_has_an_empty_text() -> None:
    told = [event["type"] for event in AnswerMessage("m").end("length", None, USAGE)]
    assert told[:2] == ["content_block_start", "content_block_stop"]
    whole = AnswerMessage("m").whole("length", None, USAGE)
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert whole["stop_reason"] == "max_tokens"


def test_arguments_that_are_no_json_are_kept() -> None:
    message = AnswerMessage("m")
    message.call("c1", "weather")
    message.arguments('{"a": tr')
    (block,) = message.whole("length", None, USAGE)["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": tr'}

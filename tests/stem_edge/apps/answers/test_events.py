"""Chunks of an answer as events: thoughts, text and calls, one after the other."""

from __future__ import annotations

import pytest
from tool_families import BY_NAME, TOOLS

from stem_edge.apps.answers.events import AnswerEvent, AnswerEvents, End, Whole
from stem_edge.runtime.scheduling.request import Chunk
from stem_edge.text.thoughts import KNOWN
from stem_edge.text.tool_calls.parser import CallParser

GEMMA, THINK = KNOWN
CALL = "<|tool_call>call:now{}<tool_call|>"
NOW = ["now"]


def events_of(text: str, family: str) -> list[AnswerEvent]:
    """Return the events of an answer that comes by the character, and stops."""
    thoughts = GEMMA if family == "gemma4" else THINK
    events = AnswerEvents(thoughts.parser(""), CallParser(BY_NAME[family], TOOLS))
    chunks = [Chunk(char, [1], None, None) for char in text] + [Chunk("", [1], None, "stop")]
    return [event for chunk in chunks for event in events.push(chunk)]


@pytest.mark.parametrize(
    ("family", "text", "thoughts", "content", "calls"),
    [
        ("gemma4", f"<|channel>thought\nI ask.\n<channel|>{CALL}", "I ask.", "", NOW),
        ("gemma4", f"<|channel>thought\n{CALL}<channel|>No.", CALL, "No.", []),
        ("gemma4", f"<|channel>thought\n{CALL}", CALL, "", []),
        ("gemma4", f"{CALL}<|channel>thought\nlate<channel|>", "",
         "<|channel>thought\nlate<channel|>", NOW),
        ("hermes", '<think>\nHm.\n</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
         "Hm.", "", NOW),
        ("hermes", "<think>\n</think>\n\nHi", "", "Hi", []),
    ],
)  # fmt: skip
def test_calls_are_read_after_thoughts(
    family: str, text: str, thoughts: str, content: str, calls: list[str]
) -> None:
    whole, found = Whole(), events_of(text, family)
    for event in found:
        whole.add(event)
    assert (whole.thoughts, whole.text) == (thoughts, content)
    assert [call.name for call in whole.calls] == calls
    assert found[-1] == End("tool_calls" if calls else "stop")

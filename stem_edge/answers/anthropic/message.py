"""An answer as Anthropic's Messages interface has it: a message of blocks, or the events that make it."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

Event = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnswerMessage:
    """A message that grows by pieces of an answer; each gives the events that tell of it.

    `whole` is the message without streaming, once the answer has ended.
    """

    def __init__(self, model: str) -> None:
        self._model, self.id = model, f"msg_{secrets.token_hex(12)}"
        self._blocks = list[dict[str, Any]]()
        self._texts = list[list[str]]()  # of each block: its text, or the JSON of its input
        self._open = False  # whether the last block can grow

    def start(self, usage: dict[str, int]) -> Event:
        """Return the first event."""
        return {"type": "message_start", "message": self._message([], None, None, usage)}

    def text(self, text: str) -> list[Event]:
        """Take text."""
        begin = list[Event]()
        if not self._open or self._blocks[-1]["type"] != "text":
            begin = self._begin({"type": "text", "text": ""})
        return [*begin, self._grow({"type": "text_delta", "text": text}, text)]

    def call(self, call_id: str, name: str) -> list[Event]:
        """Take the beginning of a call of a tool."""
        return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def arguments(self, text: str) -> list[Event]:
        """Take a piece of the arguments of the call begun last."""
        return [self._grow({"type": "input_json_delta", "partial_json": text}, text)]

    def stop(self) -> list[Event]:
        """End the block that is open, if one is."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def end(self, reason: str, stop: str | None, usage: dict[str, int]) -> list[Event]:
        """Return the last events."""
        begin = [] if self._blocks else self._begin({"type": "text", "text": ""})
        delta = {"stop_reason": _reason(reason, stop), "stop_sequence": stop}
        last = {"type": "message_delta", "delta": delta, "usage": usage}
        return [*begin, *self.stop(), last, {"type": "message_stop"}]

    def whole(self, reason: str, stop: str | None, usage: dict[str, int]) -> dict[str, Any]:
        """Return the message of an answer that has ended."""
        content = [
            block | ({"text": text} if block["type"] == "text" else {"input": _input(text)})
            for block, text in zip(self._blocks, map("".join, self._texts), strict=True)
        ]
        content = content or [{"type": "text", "text": ""}]
        return self._message(content, _reason(reason, stop), stop, usage)

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.stop()
        self._blocks.append(block)
        self._texts.append([])
        self._open = True
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": block}]

    def _grow(self, delta: dict[str, str], text: str) -> Event:
        self._texts[-1].append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _reason(reason: str, stop: str | None) -> str:
    return "stop_sequence" if stop is not None else STOP_REASONS[reason]


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; a model that no grammar leads may write what is no JSON."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"INVALID_JSON": text}


def usage_of(prompt: int, cached: int, answer: int) -> dict[str, int]:
    """Return counts of tokens; those of the prompt that were kept are not among input_tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }

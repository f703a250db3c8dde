"""An answer as Anthropic's Messages interface has it: a message of blocks, or the events that make it."""

from __future__ import annotations

import secrets
from typing import Any

from stem_edge.answers.events import AnswerEvent, End
from stem_edge.answers.growing import Growing, Told, call_input
from stem_edge.answers.refusals import anthropic_error
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.text.tool_calls.pieces import CallBegin

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class AnswerMessage(Growing):
    """A message that grows. model: its name."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._head["model"] = model
        self._started = False

    def add(self, event: AnswerEvent, request: Request) -> list[Told]:
        """Take the next event; the first one tells of the prompt, too."""
        start = [] if self._started else self._start(request)
        self._started = True
        return [*start, *super().add(event, request)]

    def failed(self, error: StemEdgeError) -> Told:
        """Return an event of an error."""
        return anthropic_error(error)

    def _start(self, request: Request) -> list[Told]:
        message = self._message([], None, None, usage_of(request))
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _new(self, call: CallBegin | None) -> Told:
        if call is None:
            # Clients send a block back only with a signature, which nobody here checks.
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            return thinking if self._kind == "thought" else {"type": "text", "text": ""}
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}

    def _begun(self, part: Told) -> list[Told]:
        return [self._of_block("start", content_block=dict(part))]

    def _more(self, text: str) -> Told:
        kind, field = DELTAS[self._kind]
        return self._of_block("delta", delta={"type": kind, field: text})

    def _stopped(self, part: Told, text: str) -> list[Told]:
        _, field = DELTAS[self._kind]
        part |= {"input": call_input(text)} if self._kind == "call" else {field: text}
        return [self._of_block("stop")]

    def _end(self, end: End, request: Request) -> list[Told]:
        begin = [] if self._parts else self._begin()
        events, usage = [*begin, *self._stop()], usage_of(request)
        reason = "stop_sequence" if end.stop is not None else STOP_REASONS[end.reason]
        self.whole = self._message(self._parts, reason, end.stop, usage)
        delta = {"stop_reason": reason, "stop_sequence": end.stop}
        last = {"type": "message_delta", "delta": delta, "usage": usage}
        return [*events, last, {"type": "message_stop"}]

    def _message(
        self, content: list[Told], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> Told:
        ended = {"stop_reason": reason, "stop_sequence": stop, "usage": usage}
        return {**self._head, "content": content, **ended}

    def _of_block(self, kind: str, **told: Any) -> Told:
        return {"type": f"content_block_{kind}", "index": self._index, **told}


def usage_of(request: Request) -> dict[str, int]:
    """Return counts of tokens; input_tokens leaves out the prompt's kept tokens."""
    return {
        "input_tokens": request.prompt_tokens - request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.cached_tokens,
        "output_tokens": request.new_tokens,
    }

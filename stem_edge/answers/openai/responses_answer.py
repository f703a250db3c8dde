"""An answer as the Responses interface has it: items, and the events that make them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from stem_edge.answers.events import AnswerEvent, End, Thought
from stem_edge.answers.growing import Growing, Told
from stem_edge.answers.openai.shapes import unix_time
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.text.tool_calls.pieces import CallBegin

DELTAS = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class AnswerItems(Growing):
    """Items that grow. echo: fields of the response that repeat the request."""

    def __init__(self, echo: Mapping[str, Any]) -> None:
        super().__init__()
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": unix_time(),
            **echo,
        }
        self._status = "completed"  # of the next item that ends
        self._number = -1  # of the last event
        self._thought_tokens = 0

    def start(self) -> list[Told]:
        """Return the first events."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def add(self, event: AnswerEvent, request: Request) -> list[Told]:
        """Take the next event, and count tokens of thoughts."""
        self._thought_tokens += event.tokens if isinstance(event, Thought) else 0
        return super().add(event, request)

    def failed(self, error: StemEdgeError) -> Told:
        """Return the last event of an answer that an error ends."""
        told = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=self._response("failed") | {"error": told})

    def _new(self, call: CallBegin | None) -> Told:
        if self._kind == "thought":
            told = {"type": "reasoning", "summary": [], "content": []}
            return {"id": f"rs_{secrets.token_hex(24)}", **told, "status": "in_progress"}
        if call is None:
            told = {"type": "message", "role": "assistant", "content": []}
            return {"id": f"msg_{secrets.token_hex(24)}", **told, "status": "in_progress"}
        told = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        return {"id": f"fc_{secrets.token_hex(24)}", **told, "status": "in_progress"}

    def _begun(self, part: Told) -> list[Told]:
        begun = self._event("response.output_item.added", output_index=self._index, item=dict(part))
        if self._kind == "call":
            return [begun]
        return [begun, self._of_item("response.content_part.added", part=self._part(""))]

    def _more(self, text: str) -> Told:
        return self._of_item(f"{DELTAS[self._kind]}.delta", delta=text)

    def _stopped(self, part: Told, text: str) -> list[Told]:
        part["status"] = self._status
        if self._kind == "call":
            part["arguments"] = text
            told = {"arguments": text, "name": part["name"]}
            events = [self._of_item(f"{DELTAS[self._kind]}.done", **told)]
        else:
            part["content"] = [self._part(text)]
            events = [
                self._of_item(f"{DELTAS[self._kind]}.done", text=text),
                self._of_item("response.content_part.done", part=self._part(text)),
            ]
        done = self._event("response.output_item.done", output_index=self._index, item=dict(part))
        return [*events, done]

    def _end(self, end: End, request: Request) -> list[Told]:
        status = "incomplete" if end.reason == "length" else "completed"
        # A complete answer has a message even without text, because clients read the first one.
        unsaid = self._kind == "thought" and status == "completed"
        begin = self._add_text("") if unsaid or not self._parts else []
        self._status = status if self._kind != "call" else "incomplete"  # of a call that broke off
        events = [*begin, *self._stop()]
        self.whole = self._response(status) | {"usage": usage_of(request, self._thought_tokens)}
        if status == "incomplete":
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.whole["completed_at"] = unix_time()
        return [*events, self._event(f"response.{status}", response=self.whole)]

    def _response(self, status: str) -> Told:
        empty = {"error": None, "incomplete_details": None}
        return {**self._head, "status": status, "output": list(self._parts), **empty}

    def _part(self, text: str) -> Told:
        if self._kind == "thought":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _of_item(self, kind: str, **told: Any) -> Told:
        """Return an event of the last item, or of its only part if it has some."""
        place = {"item_id": self._parts[-1]["id"], "output_index": self._index}
        if self._kind != "call":
            place["content_index"] = 0
        if self._kind == "text" and "part" not in told:
            place["logprobs"] = []
        return self._event(kind, **place, **told)

    def _event(self, kind: str, **told: Any) -> Told:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **told}


def usage_of(request: Request, thought_tokens: int) -> dict[str, Any]:
    """Return counts of tokens."""
    prompt, answer = request.prompt_tokens, request.new_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": request.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": prompt + answer,
    }

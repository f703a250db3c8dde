"""An answer as the Responses interface has it: items, and the events that make them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from stem_edge.answers.openai.shapes import unix_time

Event = dict[str, Any]


class AnswerItems:
    """Items that grow by pieces of an answer; each gives the events that tell of it.

    echo: fields of the response that repeat the request.
    """

    def __init__(self, echo: Mapping[str, Any]) -> None:
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": unix_time(),
            **echo,
        }
        self._items = list[dict[str, Any]]()
        self._text = list[str]()  # of the last item: its text, or its arguments
        self._open = False  # whether the last item can grow
        self._number = -1  # of the last event

    def start(self) -> list[Event]:
        """Return the first events."""
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def text(self, text: str) -> list[Event]:
        """Take text."""
        begin = list[Event]()
        if not self._open or self._items[-1]["type"] != "message":
            item = {"type": "message", "role": "assistant", "content": [], "status": "in_progress"}
            begin = self._begin({"id": f"msg_{secrets.token_hex(24)}", **item})
            begin.append(self._of_part("response.content_part.added", part=_part("")))
        self._text.append(text)
        delta = self._of_part("response.output_text.delta", delta=text, logprobs=[])
        return [*begin, delta]

    def call(self, call_id: str, name: str) -> list[Event]:
        """Take the beginning of a call of a tool."""
        told = {"call_id": call_id, "name": name, "arguments": "", "status": "in_progress"}
        return self._begin({"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", **told})

    def arguments(self, text: str) -> list[Event]:
        """Take a piece of the arguments of the call begun last."""
        self._text.append(text)
        return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def stop(self, status: str = "completed") -> list[Event]:
        """End the item that is open, if one is."""
        if not self._open:
            return []
        self._open = False
        item, text = self._items[-1], "".join(self._text)
        if item["type"] == "message":
            item |= {"content": [_part(text)], "status": status}
            events = [
                self._of_part("response.output_text.done", text=text, logprobs=[]),
                self._of_part("response.content_part.done", part=_part(text)),
            ]
        else:
            item |= {"arguments": text, "status": status}
            told = {"arguments": text, "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **told)]
        index = len(self._items) - 1
        done = self._event("response.output_item.done", output_index=index, item=dict(item))
        return [*events, done]

    def end(self, reason: str, usage: dict[str, Any]) -> list[Event]:
        """Return the last events; the last has the whole response."""
        # Even an answer without text has a message, because clients read the first one.
        begin = [] if self._items else self.text("")
        status = "incomplete" if reason == "length" else "completed"
        broken = self._open and self._items[-1]["type"] == "function_call"
        events = [*begin, *self.stop("incomplete" if broken else status)]
        response = self._response(status, self._items) | {"usage": usage}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = unix_time()
        return [*events, self._event(f"response.{status}", response=response)]

    def failed(self, message: str) -> Event:
        """Return the last event of an answer that an error ends."""
        response = self._response("failed", self._items)
        response["error"] = {"code": "server_error", "message": message}
        return self._event("response.failed", response=response)

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None}
        return {**self._head, "status": status, "output": list(items), **empty}

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        events = self.stop()
        self._items.append(item)
        self._text.clear()
        self._open = True
        index = len(self._items) - 1
        begun = self._event("response.output_item.added", output_index=index, item=dict(item))
        return [*events, begun]

    def _of_part(self, kind: str, **told: Any) -> Event:
        return self._of_item(kind, content_index=0, **told)

    def _of_item(self, kind: str, **told: Any) -> Event:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=index, **told)

    def _event(self, kind: str, **told: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **told}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    """Return counts of tokens."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }

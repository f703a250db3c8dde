"""A row whose answers are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stem_edge.answers.events import AnswerEvents, Whole
from stem_edge.batches.results import Result, failed
from stem_edge.batches.rows import Row
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk
from stem_edge.text.tool_calls.parser import CallParser

# Makes the result of the answers to all requests of a row, which have so many tokens.
Finish: TypeAlias = Callable[[Sequence[Whole], int], Result]


@dataclass
class _Part:
    """One of the answers to a row."""

    events: AnswerEvents
    whole: Whole


class Task:
    """The requests of a row, and what has come of their answers.

    parser: makes what reads calls of tools in one of them. openai: whether the row is of OpenAI's form.
    """

    def __init__(
        self,
        row: Row,
        requests: Sequence[Request],
        finish: Finish,
        parser: Callable[[], CallParser | None] = lambda: None,
        *,
        openai: bool = True,
    ) -> None:
        self.requests = requests
        self._row, self._finish, self._openai = row, finish, openai
        self._parts = {each: _Part(AnswerEvents(parser()), Whole()) for each in requests}
        self._left = len(requests)

    def push(self, request: Request, chunk: Chunk) -> Result | None:
        """Take a piece of an answer; return the result with the last one, or at the first error."""
        if chunk.error is not None:
            return self.failed(chunk.error)
        part = self._parts[request]
        for event in part.events.push(chunk):
            part.whole.add(event)
        if chunk.finish_reason is not None:
            self._left -= 1
        return None if self._left else self.result()

    def result(self) -> Result:
        """Return the result of answers that have ended."""
        tokens = sum(request.new_tokens for request in self.requests)
        return self._finish([part.whole for part in self._parts.values()], tokens)

    def failed(self, error: StemEdgeError) -> Result:
        """Return the result of an error."""
        return failed(self._row, error, openai=self._openai)

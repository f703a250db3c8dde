"""Process of one subject that is measured: it reads requests and writes answers, a line of JSON each.

The memory is that of one engine, from its first import on. stem_edge.measuring.runs.workers starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any, Protocol

# Kind of subject -> module and class of its engine.
KINDS = {
    "stem-edge": ("stem_edge.measuring.runs.stem", "StemEdge"),
    "llama.cpp": ("stem_edge.measuring.runs.llama", "LlamaModel"),
}


class MeasuredEngine(Protocol):
    """A model that is measured. Engines other than stem-edge count nothing."""

    def clear(self) -> None:
        """Empty the context."""

    def choose(self, token_ids: list[int]) -> int:
        """Process ids after the ids before them, and return the most probable next token."""

    def counters(self) -> dict[str, float]:
        """Return the engine's counters."""
        return {}


class Worker:
    """Carries out requests, one after the other: `do` names a method, which accepts the rest."""

    def __init__(self) -> None:
        self._engine: Any = None  # a MeasuredEngine, once it is loaded

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return its time and the counters."""
        do, started = request.pop("do"), time.perf_counter()
        done = getattr(self, do)(**request) or {}
        answer = {"seconds": time.perf_counter() - started} | done
        if self._engine is not None:
            answer["counters"] = self._engine.counters()
        return answer

    def start(self) -> None:
        """Do nothing, with no engine imported."""

    def bring(self, module: str) -> None:
        """Import a module before loading, so that both are timed apart."""
        import_module(module)

    def load(self, kind: str, path: str, options: dict[str, Any], **sizes: int) -> None:
        """Load an engine."""
        module, name = KINDS[kind]
        self._engine = getattr(import_module(module), name)(path, **sizes, **options)

    def prompt(self, ids: list[int]) -> None:
        """Process a prompt in an empty context."""
        self._engine.clear()
        self._engine.choose(ids)

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """Process more tokens, one by one."""
        return {"steps": [self._timed(token) for token in ids]}

    def _timed(self, token: int) -> float:
        started = time.perf_counter()
        self._engine.choose([token])
        return time.perf_counter() - started


def main() -> None:
    """Answer requests until stdin ends."""
    # Only answers may go to the pipe, so what libraries print to stdout goes to stderr instead.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    try:
        for line in sys.stdin:
            try:
                answer = worker.answer(json.loads(line))
            except Exception as error:  # any error: the other end must hear of it
                answer = {"error": str(error), "type": type(error).__name__}
            print(json.dumps(answer), file=out, flush=True)
    except BrokenPipeError:  # the other end was killed
        os._exit(1)
    # Without closing the model, because that would save the counts of this text for warm starts.
    os._exit(0)


if __name__ == "__main__":
    main()

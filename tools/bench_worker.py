"""One engine in a process of its own, told what to do by bench.py: a line of JSON in, one out.

A process each, so that memory is what that engine takes; all of them alive, so that measurements
can alternate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FIELDS = ("RssAnon", "VmSwap", "RssFile")


class Subject(Protocol):
    """What is measured."""

    def prefill(self, token_ids: list[int]) -> None:
        """Process a prompt in an empty context, up to the choice of the next token."""

    def decode(self, token_ids: list[int]) -> list[float]:
        """Process tokens one by one after it, each with the choice of the next; seconds of each."""

    def counters(self) -> dict[str, float]:
        """What the engine counted so far."""


class StemEdge:
    """stem-edge itself. Tokens are those of a real text, not its own: their rows are what counts."""

    def __init__(self, bundle: str, context: int, threads: int, options: dict[str, Any]) -> None:
        import stem_edge

        self._model = stem_edge.load(bundle, context_length=context, threads=threads, **options)
        self._engine, self._context = self._model._engine, context

    def prefill(self, token_ids: list[int]) -> None:
        """See Subject."""
        self._state = self._engine.open_context(self._context)
        for logits in self._engine.process(self._state, token_ids):
            self._choose(logits)

    def decode(self, token_ids: list[int]) -> list[float]:
        """See Subject."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            self._engine.expect(np.array([token]))
            self._choose(self._engine.step(self._state, np.array([token])))
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """See Subject."""
        rows = self._engine.rows.counters()
        return {**vars(rows), "planned": self._model.plan.total, "slots": self._model.plan.slots}

    @staticmethod
    def _choose(logits: np.ndarray) -> None:
        int(logits[0].argmax())


class LlamaCpp:
    """llama.cpp on a GGUF."""

    def __init__(self, gguf: str, context: int, threads: int, options: dict[str, Any]) -> None:
        from bench_llama import LlamaModel

        self._model = LlamaModel(Path(gguf), context, threads)

    def prefill(self, token_ids: list[int]) -> None:
        """See Subject."""
        self._model.clear()
        int(self._model.process(token_ids).argmax())

    def decode(self, token_ids: list[int]) -> list[float]:
        """See Subject."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            int(self._model.process([token]).argmax())
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}


class TorchBf16:
    """The public trainer's own way of computing: every matrix and table in memory, in bfloat16."""

    def __init__(self, bundle: str, context: int, threads: int, options: dict[str, Any]) -> None:
        from bench_torch import TorchModel

        self._model = TorchModel(bundle, context, threads)

    def prefill(self, token_ids: list[int]) -> None:
        """See Subject."""
        self._model.clear()
        self._model.process(token_ids)

    def decode(self, token_ids: list[int]) -> list[float]:
        """See Subject."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            self._model.process([token])
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}


KINDS: dict[str, Callable[[str, int, int, dict[str, Any]], Subject]] = {
    "stem-edge": StemEdge,
    "llama.cpp": LlamaCpp,
    "torch": TorchBf16,
}


def memory() -> dict[str, int]:
    """Bytes of this process by kind, and the greatest resident size so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {name: int(rest.split()[0]) << 10 for name, rest in _pairs(lines)}
    return {name: fields[name] for name in FIELDS}


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    split = [line.split(":", 1) for line in lines]
    return [(name, rest) for name, rest in split if name in FIELDS]


def answer(subject: Subject, request: dict[str, Any]) -> dict[str, Any]:
    """Do one thing and say how long it took."""
    started = time.perf_counter()
    result: dict[str, Any] = {}
    if request["do"] == "prefill":
        subject.prefill(request["ids"])
    elif request["do"] == "decode":
        result["steps"] = subject.decode(request["ids"])
    result["seconds"] = time.perf_counter() - started
    return result | {"memory": memory(), "counters": subject.counters()}


def main() -> None:
    """Load what the argument says, then answer."""
    wanted = json.loads(sys.argv[1])
    # Libraries write where they like; only answers may go where the bench listens.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    make = KINDS[wanted["kind"]]
    subject = make(wanted["path"], wanted["context"], wanted["threads"], wanted["options"])
    seconds = time.perf_counter() - started
    first = {"seconds": seconds, "memory": memory(), "counters": subject.counters()}
    print(json.dumps(first), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(subject, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()

"""One engine in a process of its own, told what to do: a line of JSON in, one out.

A process each, so that memory is what that engine takes, from the first import on; several may be
alive at once, so that measurements can take turns. See stem_edge.measuring.workers for the other
end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

# What an engine imports first, so that imports and loading are measured apart.
MODULES = {
    "stem-edge": ("stem_edge.runtime",),
    "llama.cpp": ("stem_edge.measuring.engine_llama",),
    "torch": ("stem_edge.measuring.engine_torch",),
}
# And stem-edge for one of its engines, which it would import while loading.
ENGINE_MODULES = {
    "onnxruntime": ("stem_edge.runtime.loading_ort",),
    "ggml": ("stem_edge.runtime.loading_ggml",),
}


class MeasuredEngine(Protocol):
    """What is measured."""

    def prefill(self, token_ids: list[int]) -> None:
        """Process a prompt in an empty context, up to the choice of the next token."""

    def decode(self, token_ids: list[int]) -> list[float]:
        """Process tokens one by one after it, each with the choice of the next; seconds of each."""

    def counters(self) -> dict[str, float]:
        """What the engine counted so far."""

    def about(self) -> dict[str, str]:
        """What it runs on, if that is more than the CPU."""


class StemEdge:
    """stem-edge itself. Tokens are those of a real text, not its own: their rows are what counts."""

    def __init__(self, bundle: str, context: int, threads: int, options: dict[str, Any]) -> None:
        import numpy as np

        import stem_edge

        self._array = np.array
        self._model = stem_edge.load(bundle, context_length=context, threads=threads, **options)
        self._engine, self._length = self._model.engine, context
        self._context = self._engine.open_context(1)
        self._options = options

    def prefill(self, token_ids: list[int]) -> None:
        """See MeasuredEngine."""
        self._context = self._engine.open_context(self._length)
        for logits in self._engine.process(self._context, token_ids, top=1):
            int(logits[0].argmax())

    def decode(self, token_ids: list[int]) -> list[float]:
        """See MeasuredEngine."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            ids = self._array([token])
            self._engine.expect(ids)
            int(self._engine.step(self._context, ids, top=1)[0].argmax())
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """See MeasuredEngine."""
        rows, cache = self._engine.rows, getattr(self._engine.rows, "cache", None)
        slot_nbytes = 0 if cache is None else cache.slot_nbytes
        return {
            **vars(rows.counters()),
            "planned": self._model.plan.total,
            "slots": self._model.plan.slots,
            "chunk_tokens": self._model.plan.chunk_tokens,
            "filled_slots": 0 if cache is None else cache.filled,
            "row_cache_nbytes": 0 if cache is None else cache.filled * slot_nbytes,
            "kv_nbytes": self._context.backend.nbytes,
            **self._on_device(),
        }

    def _on_device(self) -> dict[str, float]:
        plan, backend = self._model.plan.device, self._engine.backend
        if plan is None:
            return {}
        memory = getattr(
            backend, "memory", None
        )  # of the ways to compute on a device that have one
        return {
            "device_planned": plan.total,
            "device_row_cache_planned": plan.row_cache,
            "device_allocated": 0 if memory is None else memory.nbytes,
            "host_slots": self._model.plan.host_slots,
        }

    def about(self) -> dict[str, str]:
        """See MeasuredEngine."""
        from stem_edge.measuring.accelerator import about_accelerator

        plan, options = self._model.plan, self._options
        if plan.device is None and options.get("providers") is None:
            return {}
        libraries = options.get("provider_libraries")
        found = about_accelerator(options.get("providers"), libraries)
        if plan.device is not None:
            found["variant"] = str(plan.device.variant)
        elif found["provider"] != "cpu":
            found["variant"] = "portable"  # whose memory is this process's
        return found


class LlamaCpp:
    """llama.cpp on a GGUF."""

    def __init__(self, gguf: str, context: int, threads: int, options: dict[str, Any]) -> None:
        from stem_edge.measuring.engine_llama import LlamaModel

        self._model = LlamaModel(Path(gguf), context, threads)

    def prefill(self, token_ids: list[int]) -> None:
        """See MeasuredEngine."""
        self._model.clear()
        int(self._model.process(token_ids).argmax())

    def decode(self, token_ids: list[int]) -> list[float]:
        """See MeasuredEngine."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            int(self._model.process([token]).argmax())
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def about(self) -> dict[str, str]:
        """The CPU."""
        return {}


class TorchBf16:
    """The public trainer's own way of computing: every matrix and table in memory, in bfloat16."""

    def __init__(self, bundle: str, context: int, threads: int, options: dict[str, Any]) -> None:
        from stem_edge.measuring.engine_torch import TorchModel

        self._model = TorchModel(bundle, context, threads)

    def prefill(self, token_ids: list[int]) -> None:
        """See MeasuredEngine."""
        self._model.clear()
        self._model.process(token_ids)

    def decode(self, token_ids: list[int]) -> list[float]:
        """See MeasuredEngine."""
        times = []
        for token in token_ids:
            started = time.perf_counter()
            self._model.process([token])
            times.append(time.perf_counter() - started)
        return times

    def counters(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def about(self) -> dict[str, str]:
        """The CPU."""
        return {}


ENGINES: dict[str, Callable[[str, int, int, dict[str, Any]], MeasuredEngine]] = {
    "stem-edge": StemEdge,
    "llama.cpp": LlamaCpp,
    "torch": TorchBf16,
}


class Worker:
    """Does what requests say, one after the other."""

    def __init__(self) -> None:
        self._engine: MeasuredEngine | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one thing and say how long it took."""
        started = time.perf_counter()
        steps = self._do(request)
        seconds = time.perf_counter() - started
        counters = self._engine.counters() if self._engine is not None else {}
        answer = {"seconds": seconds, "steps": steps, "counters": counters}
        if request["do"] == "load" and self._engine is not None:
            answer["about"] = self._engine.about()
        return answer

    def _do(self, request: dict[str, Any]) -> list[float]:
        if request["do"] == "import":
            engine = ENGINE_MODULES.get(request.get("engine", ""), ())
            for name in (*MODULES[request["kind"]], *engine):
                import_module(name)
        elif request["do"] == "load":
            self._engine = ENGINES[request["kind"]](
                request["path"], request["context"], request["threads"], request["options"]
            )
        elif self._engine is not None and request["do"] == "prefill":
            self._engine.prefill(request["ids"])
        elif self._engine is not None and request["do"] == "decode":
            return self._engine.decode(request["ids"])
        return []


def main() -> None:
    """Answer until nobody asks any more."""
    # Libraries write where they like; only answers may go where the other end listens.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    try:
        for line in sys.stdin:
            try:
                answer = worker.answer(json.loads(line))
            except Exception as error:  # whatever it is, the other end must hear of it
                answer = {"error": str(error), "type": type(error).__name__}
            print(json.dumps(answer), file=out, flush=True)
    except BrokenPipeError:  # the other end was killed
        os._exit(1)
    os._exit(0)  # an engine that is measured keeps nothing, least of all counts of its text


if __name__ == "__main__":
    main()

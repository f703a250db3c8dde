"""Process of one engine that is measured: it reads requests and writes answers, a line of JSON each.

Every engine has its own process, so that the memory is that engine's, from the first import on.
Several may be alive at once, so that measurements can take turns. The other end is
stem_edge.measuring.bench.workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any, Protocol

from stem_edge.measuring.bench.together import Guessed, Text, Together

# Kind of subject -> module and class of its engine. The module is imported before loading, so that
# both are measured apart; for stem-edge, it is one of LOADERS instead.
ENGINES = {
    "stem-edge": ("stem_edge.measuring.bench.worker", "StemEdge"),
    "llama.cpp": ("stem_edge.measuring.bench.engine_llama", "LlamaModel"),
}
LOADERS = {
    "onnxruntime": "stem_edge.runtime.backends.onnxruntime.loader",
    "ggml": "stem_edge.runtime.backends.ggml.loader",
}


class MeasuredEngine(Protocol):
    """A model that is measured. Engines other than stem-edge count nothing and run on the CPU."""

    def clear(self) -> None:
        """Empty the context."""

    def choose(self, token_ids: list[int]) -> int:
        """Process ids after those before and return the most probable next token."""

    def counters(self) -> dict[str, float]:
        """Return the engine's counters."""
        return {}

    def about(self) -> dict[str, str]:
        """Describe the accelerator, real or emulated; return nothing on the CPU."""
        return {}

    def together(self, texts: list[Text], count: int) -> Together:
        """Follow texts with `count` sequences at a time; see stem_edge.measuring.bench.together."""

    def guess(self, text: Text, drafts: int) -> Guessed:
        """Follow a text with speculation. drafts: guesses of a step, where loading did not say."""


class StemEdge(MeasuredEngine):
    """stem-edge itself, fed with tokens of a real text: its own could repeat the same few rows."""

    def __init__(self, bundle: str, context: int, threads: int, **options: Any) -> None:
        import numpy as np

        import stem_edge

        self._array = np.array
        self._model = stem_edge.load(bundle, context_length=context, threads=threads, **options)
        self._engine, self._length, self._options = self._model.engine, context, options
        self._context = self._engine.open_context(1)

    def clear(self) -> None:
        self._context = self._engine.open_context(self._length)

    def choose(self, token_ids: list[int]) -> int:
        """Process a prompt in chunks, or a single token as generating does."""
        if len(token_ids) == 1:
            ids = self._array(token_ids)
            self._engine.expect(ids)
            return int(self._engine.step(self._context, ids, top=1)[0].argmax())
        best = -1
        for logits in self._engine.process(self._context, token_ids, top=1):
            best = int(logits[0].argmax())
        return best

    def together(self, texts: list[Text], count: int) -> Together:
        from stem_edge.measuring.bench.stem_steps import decode_together

        return decode_together(self._model, texts, count)

    def guess(self, text: Text, drafts: int) -> Guessed:
        from stem_edge.measuring.bench.stem_steps import decode_guessing

        return decode_guessing(self._model, text, drafts)

    def counters(self) -> dict[str, float]:
        """Return the counters of the rows, and the sizes of plan and caches in bytes."""
        plan, rows = self._model.plan, self._engine.rows
        cache = getattr(rows, "cache", None)
        filled, slot_nbytes = (0, 0) if cache is None else (cache.filled, cache.slot_nbytes)
        found = {
            **vars(rows.counters()),
            "planned": plan.total,
            "slots": plan.slots,
            "chunk_tokens": plan.chunk_tokens,
            "filled_slots": filled,
            "row_cache_nbytes": filled * slot_nbytes,
            "kv_nbytes": self._context.backend.nbytes,
        }
        if plan.device is not None:
            loaded = getattr(self._engine.backend, "loaded", None)  # portable graphs have none
            found |= {
                "device_planned": plan.device.total,
                "device_row_cache_planned": plan.device.row_cache,
                "device_allocated": 0 if loaded is None else loaded.memory.nbytes,
                "host_slots": plan.host_slots,
            }
        return found

    def about(self) -> dict[str, str]:
        from stem_edge.measuring.memory.gpu import about_accelerator

        device, providers = self._model.plan.device, self._options.get("providers")
        if device is None and providers is None:
            return {}
        found = about_accelerator(providers, self._options.get("provider_libraries"))
        if device is not None:
            found["variant"] = str(device.variant)
        elif found["provider"] != "cpu":
            found["variant"] = "portable"  # it has no device plan, because its memory is the host's
        return found


class Worker:
    """Carries out requests, one after the other."""

    def __init__(self) -> None:
        self._engine: MeasuredEngine | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return its times and the counters."""
        started = time.perf_counter()
        done = self._do(request)
        seconds = time.perf_counter() - started
        engine, answer = self._engine, {"seconds": seconds, "steps": [], "counters": {}} | done
        if engine is not None:
            answer["counters"] = engine.counters()
            answer["about"] = engine.about() if request["do"] == "load" else {}
        return answer

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request; return what was measured beside its time."""
        match request["do"], self._engine:
            case "import", _:
                import_module(LOADERS.get(request["engine"], ENGINES[request["kind"]][0]))
            case "load", _:
                module, name = ENGINES[request["kind"]]
                load, options = getattr(import_module(module), name), request["options"]
                path, context, threads = (request[key] for key in ("path", "context", "threads"))
                self._engine = load(path, context, threads, **options)
            case "prefill", engine if engine is not None:
                engine.clear()
                engine.choose(request["ids"])
            case "decode", engine if engine is not None:
                return {"steps": [_timed(engine, token) for token in request["ids"]]}
            case "together", engine if engine is not None:
                texts = [Text(*text) for text in request["texts"]]
                return {"figures": engine.together(texts, request["count"]).figures()}
            case "guess", engine if engine is not None:
                found = engine.guess(Text(*request["text"]), request["drafts"])
                return {"own": found.own, "figures": found.figures()}
        return {}


def _timed(engine: MeasuredEngine, token: int) -> float:
    started = time.perf_counter()
    engine.choose([token])
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

"""Python's own share of a decode step: everything but the backbone's forward and the flash read.

    python tools/bench/bench_python.py [BUNDLE]

Without BUNDLE it makes one of random weights with a vocabulary of 128,256 in a temporary folder
(about 1 GB for a moment, half a minute). Prompts are cut from the token ids of BUNDLE's vocabulary
at random, so that most rows miss: the worst case for the cache's bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import stem_edge
from stem_edge.runtime import Model, SamplingParams

LOGIT_SPREAD = 3.0
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_k 40": {"temperature": 0.8, "top_k": 40},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}


class Meter:
    """Seconds spent in the backbone, wherever a context runs it."""

    def __init__(self, model: Model) -> None:
        self.seconds = 0.0
        self._engine = model.engine

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every backbone run inside the block."""
        real = self._engine.backend.open_context

        def open_context(length: int) -> Any:
            context = real(length)
            for name in ("begin", "finish"):
                setattr(context, name, self._timed(getattr(context, name)))
            return context

        self._engine.backend.open_context = open_context  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._engine.backend.open_context = real  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def share(model: Model, options: dict[str, Any], tokens: int) -> list[float]:
    """Milliseconds of Python in each decode step of one generation."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocab_size, 64).tolist()
    params = SamplingParams(max_new_tokens=tokens, seed=0, **options)
    meter, steps = Meter(model), list[float]()
    with meter.watching():
        before = None
        for _ in model._tokens(prompt, params, model._lookups(prompt, None)):
            now = (time.perf_counter(), meter.seconds, model.engine.rows.counters().stall_seconds)
            if before is not None:
                total, forward, stall = (a - b for a, b in zip(now, before, strict=True))
                steps.append((total - forward - stall) * 1000)
            before = now
    return steps


def make_bundle(folder: Path) -> Path:
    """A bundle whose vocabulary is that of Llama 3 and whose layers are small."""
    import torch
    from make_checkpoint import Shape, write_checkpoint

    shape = Shape(
        vocab_size=128_256, dim=64, n_layers=16, n_heads=4, d_ff=256, max_seqlen=1024,
        stem_layers=(2, 5, 8, 11, 14),
    )  # fmt: skip
    checkpoint = write_checkpoint(folder / "checkpoint", shape, layout="consolidated")
    # Logits as spread as a trained model's: those of random weights are nearly all alike.
    state = torch.load(checkpoint / "consolidated.pth", weights_only=True)
    state["model"]["norm.weight"] *= LOGIT_SPREAD
    torch.save(state, checkpoint / "consolidated.pth")
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle")
    return folder / "bundle"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?", metavar="BUNDLE")
    parser.add_argument("--tokens", type=int, default=200, help="decode steps for a setting (200)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or make_bundle(Path(folder))
        with stem_edge.load(bundle) as model:
            share(model, {}, 20)  # warm up
            found = {name: share(model, options, args.tokens) for name, options in SETTINGS.items()}
            vocabulary = model.config.vocab_size
    rows = {
        name: {"median_ms": statistics.median(steps), "p90_ms": float(np.quantile(steps, 0.9))}
        for name, steps in found.items()
    }
    if args.json:
        print(json.dumps({"vocab_size": vocabulary, "settings": rows}, indent=1))
        return
    print(f"Python's share of a decode step, vocabulary {vocabulary:,}, milliseconds")
    print(f"{'sampling':<32}{'median':>8}{'90 %':>8}")
    for name, row in rows.items():
        print(f"{name:<32}{row['median_ms']:>8.3f}{row['p90_ms']:>8.3f}")


if __name__ == "__main__":
    main()

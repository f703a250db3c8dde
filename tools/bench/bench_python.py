"""Time Python's share of a decode step: everything but the backbone's computation and flash reads.

    python tools/bench/bench_python.py [BUNDLE]

Without BUNDLE, it exports random weights with a vocabulary of 128,256 to a temporary folder (half a
minute, up to 1 GB). Prompts are random token ids, so that most rows miss: the worst case for the
bookkeeping of the cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import stem_edge
from stem_edge.runtime import Model, SamplingParams
from stem_edge.runtime.generation import Answer

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


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Wrap a call to add its seconds to `spent[0]`."""

    def run(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            spent[0] += time.perf_counter() - started

    return run


def share(model: Model, options: dict[str, Any], tokens: int) -> list[float]:
    """Milliseconds spent in Python in each decode step of one generation."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, 64).tolist()
    params = SamplingParams(max_new_tokens=tokens, seed=0, **options)
    backend, spent, totals = model.engine.backend, [0.0], list[float]()
    real = backend.open_context

    def open_context(length: int) -> Any:
        context = real(length)
        for name in ("begin", "finish"):
            setattr(context, name, timed(getattr(context, name), spent))
        return context

    backend.open_context = open_context  # type: ignore[method-assign]
    try:
        lookups = model._open_edits.lookups(prompt, None)
        for _ in model._tokens(prompt, Answer(prompt, params, ()), lookups, len(prompt) + tokens):
            stalled = model.engine.rows.counters().stall_seconds
            totals.append(time.perf_counter() - spent[0] - stalled)
    finally:
        backend.open_context = real  # type: ignore[method-assign]
    return [1000 * (after - before) for before, after in itertools.pairwise(totals)]


def make_bundle(folder: Path) -> Path:
    """Export small layers with the vocabulary of Llama 3. Returns the bundle."""
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from make_checkpoint import Shape, write_checkpoint

    shape = Shape(
        vocab_size=128_256, dim=64, n_layers=16, n_heads=4, d_ff=256, max_seqlen=1024,
        stem_layers=(2, 5, 8, 11, 14),
    )  # fmt: skip
    checkpoint = write_checkpoint(folder / "checkpoint", shape, layout="consolidated")
    # Spread the logits like a trained model's: from nearly equal ones, samplers keep too many candidates.
    state = torch.load(checkpoint / "consolidated.pth", weights_only=True)
    state["model"]["norm.weight"] *= LOGIT_SPREAD
    torch.save(state, checkpoint / "consolidated.pth")
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle")
    return folder / "bundle"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?", metavar="BUNDLE")
    parser.add_argument("--tokens", type=int, default=200, help="decode steps per setting (200)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or make_bundle(Path(folder))
        with stem_edge.load(bundle) as model:
            share(model, {}, 20)  # to warm up
            found = {name: share(model, options, args.tokens) for name, options in SETTINGS.items()}
            vocabulary = model.config.vocab_size
    print(f"Python's share of a decode step, vocabulary {vocabulary:,}, milliseconds")
    print(f"{'sampling':<32}{'median':>8}{'90 %':>8}")
    for name, steps in found.items():
        print(f"{name:<32}{statistics.median(steps):>8.3f}{np.quantile(steps, 0.9):>8.3f}")


if __name__ == "__main__":
    main()

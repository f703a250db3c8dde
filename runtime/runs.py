"""Does a bundle give the same tokens however it is run? For users to check on their own machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stem_edge.bundle import open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.engine import LEAST_CHUNK
from stem_edge.runtime.loading import load
from stem_edge.runtime.machine import available_memory
from stem_edge.runtime.prepared import LEAST_NBYTES, matrices_nbytes

PROMPT_TOKENS = 96
# Of what the machine leaves, tables may take so much to be read whole for this.
RESIDENT_SHARE = 0.5
TEXT = """\
A memory of words is no memory of things: whoever counts the ships in a harbour at dawn, the masts
and the ropes, the gulls above them, will remember the cold, and the colour of the water."""


def verify_runs(
    path: str | Path,
    prompt: str = TEXT,
    max_new_tokens: int = 32,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> dict[str, str]:
    """Generate greedily in every way of running, which must not change a token.

    Returns way -> "ok" or where it differs from the plain loop with rows for a single chunk. The
    two graphs that can take prompts round differently, so each is compared with itself.
    `progress` is called with the name of each way. Raises what `load` raises.
    """
    bundle = open_bundle(path)
    results: dict[str, str] = {}
    for prefill in [False, True][: 1 + bundle.manifest.has_prefill]:
        expected: list[int] | None = None
        for name, options in _ways(path).items():
            name = f"{name}, prefill graph" if prefill else name
            progress(name)
            tokens = _run(path, prompt, max_new_tokens, options, prefill, cache_dir)
            expected = expected or tokens
            results[name] = _compared(tokens, expected)
    return results


def _ways(path: str | Path) -> dict[str, dict[str, Any]]:
    """Name -> options of load. The first is the one that the others are compared with."""
    bundle = open_bundle(path)
    tables = bundle.manifest.tables
    plain = {"overlap": False, "prepare": False, "warm_start": False}
    ways: dict[str, dict[str, Any]] = {"plain": plain, "overlapped": plain | {"overlap": True}}
    if matrices_nbytes(bundle) >= LEAST_NBYTES:
        ways["prepared"] = plain | {"prepare": True}
    if tables is None:
        return ways
    several = min(64, tables.records)
    ways |= {
        "fewest slots": plain | {"slots": min(LEAST_CHUNK, tables.records)},
        f"{several} slots, overlapped": plain | {"slots": several, "overlap": True},
        "mmap": plain | {"reads": "mmap"},
        "mmap, overlapped": plain | {"reads": "mmap", "overlap": True},
        "warm start": plain | {"warm_start": True},
        "emulated SD card, overlapped": plain | {"emulate_flash": "sdcard", "overlap": True},
    }
    if tables.records * tables.record_nbytes < RESIDENT_SHARE * available_memory():
        ways["resident"] = plain | {"resident": True}
    return ways


def _run(
    path: str | Path,
    prompt: str,
    max_new_tokens: int,
    options: dict[str, Any],
    prefill: bool,
    cache_dir: str | Path | None,
) -> list[int]:
    with load(path, prefill_graph=prefill, cache_dir=cache_dir, **options) as model:
        room = model.plan.context_length - max_new_tokens
        if room < 1:
            raise InputError(f"{max_new_tokens} new tokens do not fit into the context")
        ids = model.tokenize(prompt)[: min(PROMPT_TOKENS, room)]
        chunks = model.generate(ids, max_new_tokens=max_new_tokens)
        return [token for chunk in chunks for token in chunk.token_ids]


def _compared(tokens: list[int], expected: list[int]) -> str:
    if tokens == expected:
        return "ok"
    pairs = enumerate(zip(tokens, expected, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(expected)))
    return f"other tokens from the {at + 1}. new one on"

"""Does a bundle give the same tokens however it is run? For users to check on their own machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.engines import check_installed, is_installed
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.loading import load
from stem_edge.runtime.text.codec import same_start
from stem_edge.system.memory import available_memory

PROMPT_TOKENS = 96
# Of what the machine leaves, tables may take so much to be read whole for this.
RESIDENT_SHARE = 0.5
NOT_RUN = "not run"
# ggml has other kernels for attention of so many tokens at once, and for products of a few.
TILE, SLOTS_BELOW, FEWEST_SLOTS = 64, 48, 16
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
    """Generate greedily in every way: name of the way -> "ok", or where tokens begin to differ.

    Engines, and what in them computes with other kernels, round differently, so ways are compared
    within each of these; on ggml, also those with chunks of 64 tokens or more, and those with
    smaller ones. An engine that the bundle has a backbone for and that is not installed is a way
    that was "not run: ...". `progress` is called with the name of each way. Raises what `load`
    raises, BackendError if no engine is installed.
    """
    bundle = open_bundle(path)
    engines = bundle.manifest.engines
    if not any(map(is_installed, engines)):
        check_installed(bundle, engines[0])
    results: dict[str, str] = {}
    for engine in engines:
        if reason := _missing(engine, cache_dir):
            progress(engine)
            results[engine] = f"{NOT_RUN}: {reason}"
            continue
        for kernels, choice in _kernels(bundle, engine, cache_dir).items():
            expected: dict[bool, list[int]] = {}
            for way, options in _ways(bundle, engine, cache_dir).items():
                name = f"{way}, {kernels}" if kernels else way
                progress(name)
                tokens = _run(path, prompt, max_new_tokens, options | choice, cache_dir)
                tiled = engine == "onnxruntime" or options.get("slots", TILE) >= TILE
                results[name] = _compared(tokens, expected.setdefault(tiled, tokens))
    if all(result.startswith(NOT_RUN) for result in results.values()):
        raise BackendError(f"{path}: {'; '.join(results.values())}")
    return results


def _kernels(
    bundle: Bundle, engine: EngineName, cache_dir: str | Path | None
) -> dict[str, dict[str, Any]]:
    """What rounds in its own way -> options of load that choose it."""
    if engine == "onnxruntime":
        found: dict[str, dict[str, Any]] = {"": {"prefill_graph": False}}
        if bundle.manifest.has_prefill:
            found["prefill graph"] = {"prefill_graph": True}
    else:
        found = {"ggml": {}}
        if _can_repack(bundle, cache_dir):
            found["ggml repacked"] = {"repack": True}
    return {name: options | {"engine": engine} for name, options in found.items()}


def _missing(engine: EngineName, cache_dir: str | Path | None) -> str:
    """Why an engine cannot run here; empty if it can."""
    if not is_installed(engine):
        return f"{engine} is not installed"
    if engine == "ggml":
        from stem_edge.ggml.check import checked_ggml

        try:
            checked_ggml(cache_dir)
        except BackendError as error:
            return str(error)
    return ""


def _can_repack(bundle: Bundle, cache_dir: str | Path | None) -> bool:
    """Whether there are matrices that this build of ggml rearranges."""
    from stem_edge.ggml.check import checked_ggml
    from stem_edge.runtime.backends.ggml.weights import can_repack

    ggml = checked_ggml(cache_dir)
    return can_repack(ggml) and footprint_of(bundle.manifest, "ggml").repacked_nbytes > 0


def _ways(
    bundle: Bundle, engine: EngineName, cache_dir: str | Path | None
) -> dict[str, dict[str, Any]]:
    """Name -> options of load. The first is the one that the others are compared with."""
    tables = bundle.manifest.tables
    plain = {"overlap": False, "prepare": False, "warm_start": False}
    ways: dict[str, dict[str, Any]] = {"plain": plain, "overlapped": plain | {"overlap": True}}
    if engine == "onnxruntime" and _is_prepared(bundle, cache_dir):
        ways["prepared"] = plain | {"prepare": True}
    if tables is None:
        return ways
    fewest, several = (LEAST_CHUNK, 64) if engine == "onnxruntime" else (FEWEST_SLOTS, SLOTS_BELOW)
    several = min(several, tables.records)
    ways |= {
        "fewest slots": plain | {"slots": min(fewest, tables.records)},
        f"{several} slots, overlapped": plain | {"slots": several, "overlap": True},
        "mmap": plain | {"reads": "mmap"},
        "mmap, overlapped": plain | {"reads": "mmap", "overlap": True},
        "warm start": plain | {"warm_start": True},
        "emulated SD card, overlapped": plain | {"emulate_flash": "sdcard", "overlap": True},
    }
    if tables.records * tables.record_nbytes < RESIDENT_SHARE * available_memory():
        ways["resident"] = plain | {"resident": True}
    return ways


def _is_prepared(bundle: Bundle, cache_dir: str | Path | None) -> bool:
    """Whether load prepares the backbone here."""
    from stem_edge.runtime.backends.onnxruntime.prepacked import is_worth_it

    return is_worth_it(bundle, cache_dir)


def _run(
    path: str | Path,
    prompt: str,
    max_new_tokens: int,
    options: dict[str, Any],
    cache_dir: str | Path | None,
) -> list[int]:
    with load(path, cache_dir=cache_dir, **options) as model:
        room = model.plan.context_length - max_new_tokens
        if room < 1:
            raise InputError(f"{max_new_tokens} new tokens do not fit into the context")
        ids = model.tokenize(prompt)[: min(PROMPT_TOKENS, room)]
        chunks = model.generate(ids, max_new_tokens=max_new_tokens)
        return [token for chunk in chunks for token in chunk.token_ids]


def _compared(tokens: list[int], expected: list[int]) -> str:
    if tokens == expected:
        return "ok"
    return f"other tokens from the {same_start(tokens, expected) + 1}. new one on"

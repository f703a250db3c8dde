"""Checking, on the user's own machine, that a bundle gives the same tokens however it is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.backends.engines import check_installed, engines_of
from stem_edge.runtime.backends.ways import EngineWays, Ways
from stem_edge.runtime.loading import load
from stem_edge.runtime.text.codec import same_start
from stem_edge.system.memory import available_memory

PROMPT_TOKENS = 96
# Tables are made resident only if they fit into this share of the available memory.
RESIDENT_SHARE = 0.5
NOT_RUN = "not run"
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
    """Generate greedily in every way of running a bundle; way -> "ok", or where tokens differ.

    Engines, and different kernels of one engine, round differently, so only ways that use the same
    kernels are compared; on ggml, that also separates chunks of 64 tokens or more from smaller ones.
    An engine that is not installed, but that the bundle has a backbone for, is reported as
    "not run: ...". `progress` is called with the name of each way before it runs.

    Raises what `load` raises, and BackendError if no engine could run.
    """
    bundle = open_bundle(path)
    engines = engines_of(bundle)
    if not any(engine.installed for engine in engines):
        check_installed(bundle, engines[0].name)
    results: dict[str, str] = {}
    for engine in engines:
        absent = "" if engine.installed else f"{engine.name} is not installed"
        if reason := absent or engine.ways.missing(cache_dir):
            progress(engine.name)
            results[engine.name] = f"{NOT_RUN}: {reason}"
            continue
        own = engine.ways
        for kernels, choice in own.kernels(bundle, cache_dir).items():
            expected: dict[bool, list[int]] = {}
            for way, options in _ways(bundle, own, cache_dir).items():
                name = f"{way}, {kernels}" if kernels else way
                progress(name)
                options |= choice | {"engine": engine.name}
                tokens = _run(bundle.path, prompt, max_new_tokens, options, cache_dir)
                tiled = options.get("slots", own.tile) >= own.tile
                same = same_start(tokens, expected.setdefault(tiled, tokens))
                differs = tokens != expected[tiled]
                results[name] = f"other tokens from new token {same + 1} on" if differs else "ok"
    if all(result.startswith(NOT_RUN) for result in results.values()):
        raise BackendError(f"{bundle.path}: {'; '.join(results.values())}")
    return results


def _ways(bundle: Bundle, own: EngineWays, cache_dir: str | Path | None) -> Ways:
    """Ways to run an engine: name -> options of `load`. The first is what others must agree with."""
    tables = bundle.manifest.tables
    plain = {"overlap": False, "prepare": False, "warm_start": False}
    ways: Ways = {"plain": plain, "overlapped": plain | {"overlap": True}}
    ways |= {name: plain | options for name, options in own.ways(bundle, cache_dir).items()}
    if tables is None:
        return ways
    fewest, several = own.few_slots
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
            raise InputError(
                f"{max_new_tokens} new tokens leave no room for a prompt in the context of "
                f"{model.plan.context_length}; ask for fewer"
            )
        ids = model.tokenize(prompt)[: min(PROMPT_TOKENS, room)]
        chunks = model.generate(ids, max_new_tokens=max_new_tokens)
        return [token for chunk in chunks for token in chunk.token_ids]

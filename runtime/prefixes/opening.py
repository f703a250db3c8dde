"""Opening of what keeps the prompts of a loaded model."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from stem_edge.bundle.manifest import encode_manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.system.user_folder import cache_folder, cpu_digest


def can_keep(plan: MemoryPlan) -> bool:
    """Return whether memory is provided as a context fills; others take all of theirs at once."""
    return plan.device is None


def open_prefixes(
    bundle: Bundle, engine: Engine, plan: MemoryPlan, options: LoadOptions
) -> Prefixes:
    """Open what keeps prompts, in memory and in the folder of `prompt_cache`, as far as these allow."""
    keep, folder = options.keep_prefixes and can_keep(plan), None
    fingerprint = partial(_fingerprint, bundle, plan, options)
    if keep and (given := options.prompt_cache):
        from stem_edge.runtime.prefixes.folder import FOLDER, PrefixFolder

        path = cache_folder(options.cache_dir) / FOLDER if given is True else Path(given)
        folder = PrefixFolder(path, fingerprint())
    return Prefixes(
        engine, plan.context_length, plan.kv_nbytes, folder, keeps=keep, fingerprint=fingerprint
    )


def _fingerprint(bundle: Bundle, plan: MemoryPlan, options: LoadOptions) -> str:
    """Return all that decides keys and values of token ids here, to the last bit."""
    facts: dict[str, object] = {
        **ENGINES[plan.engine].versions,
        "bundle": hashlib.sha256(encode_manifest(bundle.manifest)).hexdigest(),
        "engine": plan.engine,
        "kv": plan.kv,
        "processor": cpu_digest(),
        "threads": options.cpus,
        "prefill graph": plan.prefill,
        "repacked": options.repack,
    }
    return "\n".join(f"{name}: {facts[name]}" for name in sorted(facts))

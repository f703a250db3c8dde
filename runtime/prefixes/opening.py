"""Opens the folder of cached prompts on disk, and computes the fingerprint of its usable files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stem_edge.bundle.manifest import encode_manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.files.names import cache_folder
from stem_edge.runtime.backends.engines import versions
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.prefixes.folder import FOLDER, PrefixFolder
from stem_edge.system.processor import cpu_digest


def open_folder(bundle: Bundle, plan: MemoryPlan, options: LoadOptions) -> PrefixFolder:
    """Open the folder that `prompt_cache` names; True means one in the cache folder."""
    given = options.prompt_cache
    path = (
        Path(given) if isinstance(given, str | Path) else cache_folder(options.cache_dir) / FOLDER
    )
    return PrefixFolder(path, fingerprint(bundle, plan, options))


def fingerprint(bundle: Bundle, plan: MemoryPlan, options: LoadOptions) -> str:
    """Return a text that lists everything on which keys and values depend, except token ids."""
    facts: dict[str, object] = {
        **versions(plan.engine),
        "bundle": hashlib.sha256(encode_manifest(bundle.manifest)).hexdigest(),
        "engine": plan.engine,
        "kv": plan.kv,
        "processor": cpu_digest(),
        "threads": options.cpus,
        "prefill graph": plan.prefill,
    }
    return "\n".join(f"{name}: {facts[name]}" for name in sorted(facts))

"""Opens the folder of cached prompts on disk."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.manifest import digest, encode_manifest
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
    # Everything on which keys and values depend, except token ids.
    code = sorted(versions(plan.engine).items())
    computing = plan.kv, cpu_digest(), options.cpus, plan.prefill
    return PrefixFolder(path, digest(encode_manifest(bundle.manifest), code, *computing))

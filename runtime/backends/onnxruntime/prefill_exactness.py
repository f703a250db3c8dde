"""How far the graph for prompts is from those that decode on this machine: measured once, and cached."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import onnxruntime as ort

from stem_edge import __version__
from stem_edge.bundle.checksums import check_hashes
from stem_edge.bundle.manifest import digest
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import matrices_nbytes, weight_files
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.whole_file import write_whole
from stem_edge.system.memory import own_memory, return_freed_memory
from stem_edge.system.user_folder import cache_folder, cpu_digest

EXACTNESS = "exactness"  # folder in the user's cache folder
MAX_NBYTES = 64
COPIES = 4  # of the matrices: in their file, read, packed, and what a session takes beside them


def cached_divergence(bundle: Bundle, cache_dir: str | Path | None) -> float | None:
    """Return the divergence in nats that was measured for these weights on this processor; None if none was."""
    with suppress(OSError, ValueError, InputError):
        return float(disk.read_file(_file(bundle, cache_dir), MAX_NBYTES))
    return None


def measured_divergence(bundle: Bundle, cache_dir: str | Path | None, limit: int) -> float | None:
    """Return the divergence in nats, which is measured if it is not known; None without the memory for it.

    limit: on the memory of this process.
    """
    if (known := cached_divergence(bundle, cache_dir)) is not None:
        return known
    if own_memory() + COPIES * matrices_nbytes(bundle.manifest) > limit:
        return None
    from stem_edge.runtime.backends.onnxruntime.prepared.prefill_measure import prefill_divergence
    from stem_edge.runtime.backends.onnxruntime.providers.graphs import joined_graphs

    # The result is found by the checksums in the manifest, so it must be of these very files.
    check_hashes(bundle, weight_files(bundle.manifest))
    found = prefill_divergence(bundle, joined_graphs(bundle, prefill=True))
    return_freed_memory()
    if found is None:
        return None
    with suppress(OSError, InputError):
        path = _file(bundle, cache_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{found:.3g}".encode())
    return found


def _file(bundle: Bundle, cache_dir: str | Path | None) -> Path:
    files = {name: entry.sha256 for name, entry in sorted(bundle.manifest.files.items())}
    name = digest(files, bundle.manifest.model, ort.__version__, __version__, cpu_digest())
    return cache_folder(cache_dir) / EXACTNESS / name

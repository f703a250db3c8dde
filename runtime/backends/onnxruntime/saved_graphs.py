"""Encoded graphs of a backbone in the cache folder, so that only its first load builds them."""

from __future__ import annotations

import hashlib
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from stem_edge import __file__ as package
from stem_edge import __version__
from stem_edge.bundle.manifest import digest, encode_manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.names import cache_folder
from stem_edge.graph.kv import X86, KvType
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.backends.options import LoadOptions

GRAPHS = "graphs"  # folder in the user's cache folder
MAX_NBYTES = 1 << 26  # of a file
# Code of the package that determines the graphs. A frozen program has none of these files.
BUILDERS = (
    *("*.py", "graph/**/*.py", "numerics/*.py", "tables/*.py"),
    *(f"runtime/backends/onnxruntime/providers/{name}.py" for name in ("graphs", "joined")),
)


def saved_graphs(bundle: Bundle, kv: KvType, options: LoadOptions) -> dict[str, GraphSource]:
    """Return graph name -> encoded graph for the CPU. Reads the graphs if an earlier load saved them."""
    manifest, path = bundle.manifest, None
    # Graphs over linked weights, as in a hub's cache, name the links' targets, so they are not saved.
    linked = any(bundle.file(name).is_symlink() for name in manifest.format.files)
    with suppress(InputError, OSError, ValueError, zlib.error):  # msgspec raises ValueError
        if options.weights == "prepared" and not linked:
            key = digest(builders(), encode_manifest(manifest), kv, X86)
            path = cache_folder(options.cache_dir) / GRAPHS / key
            saved = zlib.decompress(disk.read_file(path, MAX_NBYTES))  # which checks its checksum
            graphs = msgspec.msgpack.decode(saved, type=dict[str, bytes])
            return {name: GraphSource(name, data, bundle.path) for name, data in graphs.items()}
    from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs

    built = cpu_graphs(bundle, prefill=manifest.has_prefill, kv=kv)
    with suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = msgspec.msgpack.encode({name: source.data for name, source in built.items()})
            disk.write_whole(path, zlib.compress(data))
    return built


@cache
def builders() -> str:
    """Return version and digest of the code that builds graphs; if they change, saved graphs are stale."""
    folder = Path(package).parent
    files = sorted(file for pattern in BUILDERS for file in folder.glob(pattern))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return f"{__version__} {code.hexdigest()}"

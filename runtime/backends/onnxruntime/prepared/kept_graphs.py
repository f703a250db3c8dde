"""Graphs of a bundle as they were built before: building hundreds of layers' nodes takes a tenth of a second each time."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import msgspec
import onnxruntime as ort

from stem_edge import __file__ as package
from stem_edge import __version__
from stem_edge.bundle.manifest import MANIFEST, MAX_MANIFEST_NBYTES, digest
from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.files.whole_file import write_whole
from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.onnxruntime.providers.graphs import joined_graphs
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.system.user_folder import cpu_digest

FORMAT, GRAPHS = 1, "graphs"  # folder in the user's cache folder
MAX_NBYTES = 64 << 20
CHECKSUM_NBYTES = 4
# Code that graphs follow from, in the package; none of these files is there in a frozen program.
BUILDERS = (
    *("*.py", "bundle/*.py", "graph/**/*.py", "numerics/*.py", "tables/*.py"),
    *(f"runtime/backends/onnxruntime/providers/{name}.py" for name in ("graphs", "pairs")),
)


def kept_graphs(
    root: Path, bundle: Bundle, *, prefill: bool, kv: KvType = "fp32"
) -> dict[str, GraphSource]:
    """Return what `joined_graphs` returns, built once for this code, manifest and place."""
    try:
        manifest = disk.read_file(bundle.file(MANIFEST), MAX_MANIFEST_NBYTES)
    except OSError:  # it is reported where it is read
        return joined_graphs(bundle, prefill=prefill, kv=kv)
    # The name as it was given, too, because sources have it: it may be a link, or begin where we are.
    places = str(bundle.path), str(bundle.path.resolve())
    # Graphs follow from kernels, too: which products take a token alone with two rows.
    described = digest(manifest, *places, prefill, kv, ort.__version__, cpu_digest())
    path = root / GRAPHS / f"{builders()}-{described}"
    with contextlib.suppress(OSError, ValueError):  # msgspec raises ValueError
        data = disk.read_file(path, MAX_NBYTES)
        checksum, data = int.from_bytes(data[:CHECKSUM_NBYTES], "little"), data[CHECKSUM_NBYTES:]
        if zlib.crc32(data) == checksum:
            found = msgspec.msgpack.decode(data, type=list[GraphSource], dec_hook=_path)
            return {graph.name: graph for graph in found}
    built = joined_graphs(bundle, prefill=prefill, kv=kv)
    data = msgspec.msgpack.encode(list(built.values()), enc_hook=str)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, zlib.crc32(data).to_bytes(CHECKSUM_NBYTES, "little") + data)
    return built


def builders() -> str:
    """Return a digest of the code that builds graphs, by which the names of files begin."""
    folder = Path(package).parent
    files = sorted(file for pattern in BUILDERS for file in folder.glob(pattern))
    stats = [(str(file), disk.status(file)) for file in files]
    changed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return digest(FORMAT, __version__, changed)


def _path(kind: type, value: str) -> Path:
    return Path(value)

"""The prepared backbone: graphs with weights packed once for this processor, and then mapped.

onnxruntime packs matrices into anonymous memory on loading, which the system cannot reclaim. It can
also save what it packed and map it from there, so that the weights of a loaded model are pages of a
file. A child process does it (prepack_worker.py), because native code keeps some of the memory that
it takes; it also measures which graph is faster for prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import onnxruntime as ort

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import TRIED_NBYTES, matrices_nbytes
from stem_edge.bundle.verdicts import Records
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.graph.float_blocks import in_blocks
from stem_edge.graph.ir import Graph
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import EMBED
from stem_edge.progress import Progress
from stem_edge.runtime.backends.memory_plan import Preparing
from stem_edge.runtime.backends.onnxruntime.needs import preparing_needs
from stem_edge.runtime.backends.onnxruntime.providers.graphs import (
    GraphSource,
    cpu_graphs,
    joined_graphs,
    joined_parts,
)
from stem_edge.runtime.backends.step_costs import StepCosts
from stem_edge.system.child import Ended, last_line, module_command, signal_name
from stem_edge.system.memory import available_memory, own_memory
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_digest
from stem_edge.units import format_size, parse_size

FORMAT = 7
FOLDER, RECORD = "prepared", "prepared.json"
TEMPORARY = ".making-"  # prefix of a folder that is being filled, or was when its maker was killed
MAX_RECORD_NBYTES = 1 << 20
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Smaller backbones are not worth files in the cache folder, since they load fast and take little.
LEAST_NBYTES = TRIED_NBYTES
POLL_SECONDS = 0.1
ANYWAY = "it still runs correctly, but loading takes longer and more memory"


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of prepared.json."""

    format: int
    bundle: str  # path of the bundle
    onnxruntime: str  # version
    cpu: str  # digest of the processor's features
    files: dict[str, tuple[Size, int]]  # name -> size and mtime in ns, to notice changes
    prefill: bool | None  # whether the prefill graph is faster; None: there is none
    seconds: dict[str, float]  # graph -> time of a prompt chunk
    # Divergence of the prefill graph from the decoding graph here, in nats; None: not measured.
    prefill_from_decode: float | None = None
    steps: StepCosts | None = None  # of decoding; None if its context is too short for them
    refused: str = ""  # why nothing was prepared, and must not be tried again by a load


class Prepacked(NamedTuple):
    """A prepared backbone in the cache folder."""

    folder: Path
    record: Prepared


class NotPrepared(RuntimeWarning):
    """The backbone could not be prepared, so loading takes longer and more memory."""


class Place(NamedTuple):
    """Where the prepared backbone of a bundle belongs, and what is there."""

    bundle: Bundle
    folder: Path
    record: Prepared | None

    @property
    def prepared(self) -> Prepacked | None:
        """The prepared backbone, if there is one."""
        if self.record is None or self.record.refused:
            return None
        return Prepacked(self.folder, self.record)

    @property
    def is_worth_it(self) -> bool:
        """True if a load uses a prepared backbone, found or made."""
        if self.record is not None:
            return not self.record.refused
        return matrices_nbytes(self.bundle.manifest) > LEAST_NBYTES


def place(bundle: Bundle, cache_dir: str | Path | None, kv: KvType = "fp32") -> Place:
    """Find the place of a bundle on this machine, which takes a while: its graphs are built.

    kv: type of keys and values, which is part of the graphs.
    """
    folder = prepared_folder(cache_folder(cache_dir), bundle, ort.__version__, kv)
    return Place(bundle, folder, read_prepared(folder))


def find_or_make(
    bundle: Bundle,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None,
    kv: KvType = "fp32",
    memory: int | str | None = None,
) -> Prepacked | None:
    """Return the prepared backbone, making it now if worth it; None, with a warning, on failure.

    A failure that would happen again is recorded, so that it is warned of only once.
    """
    found = place(bundle, cache_dir, kv)
    if found.record is not None or not found.is_worth_it:
        return found.prepared
    try:
        return make(bundle, cache_dir, threads, progress, kv, memory)
    except BackendError as error:
        warnings.warn(NotPrepared(str(error)), stacklevel=3)
        return None


def prepared_folder(root: Path, bundle: Bundle, onnxruntime: str, kv: KvType = "fp32") -> Path:
    """Return the folder for the prepared backbone of this bundle, processor and onnxruntime."""
    files = bundle.manifest.files
    graphs = joined_graphs(bundle, prefill=bundle.manifest.has_prefill, kv=kv)
    weights = [files[name].sha256 for name in (BACKBONE_DATA, PREFILL_DATA) if name in files]
    built = hashlib.sha256(b"".join(graph.data for graph in graphs.values())).hexdigest()
    described = repr((FORMAT, onnxruntime, cpu_digest(), weights, built))
    return root / FOLDER / hashlib.sha256(described.encode()).hexdigest()[:KEY_CHARS]


def read_prepared(folder: Path) -> Prepared | None:
    """Return the record of a prepared backbone; None if missing, damaged or of another format."""
    try:
        data = disk.read_file(folder / RECORD, MAX_RECORD_NBYTES)
        record = msgspec.json.decode(data, type=Prepared)
        found = {name: marks(folder / name) for name in record.files}
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None
    plain = all(Path(name).name == name for name in record.files)
    return record if record.format == FORMAT and plain and found == record.files else None


def marks(path: Path) -> tuple[int, int]:
    """Return size and mtime (ns) of a file. Raises OSError."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def make(
    bundle: Bundle,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None = None,
    kv: KvType = "fp32",
    memory: int | str | None = None,
) -> Prepacked:
    """Prepare a backbone, also one that was refused before.

    memory: limit on the memory of this process and the one that prepares; default: what is free.
    Raises BundleError; BackendError if memory or the cache folder is too small, or if it computes
    other logits, which is recorded.
    """
    root = cache_folder(cache_dir)
    needs = preparing_needs(footprint_of(bundle.manifest, "onnxruntime").with_kv(kv), threads)
    _check_memory(bundle, needs, memory)
    # The result is found by the checksums in the manifest, so the files must match them.
    Records(bundle, "onnxruntime", cache_dir).check_place()
    try:
        folder = root / FOLDER / f"{TEMPORARY}{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BackendError(
            f"{root}: cannot keep a prepared backbone there ({error.strerror}); give another "
            "folder with cache_dir"
        ) from error
    try:
        if free < needs.disk:
            raise BackendError(
                f"{root}: a prepared backbone takes {needs.disk:,} bytes, {free:,} are free; free some "
                "space, or give another folder with cache_dir"
            )
        with Progress(needs.disk, "preparing", progress) as bar:
            _run_worker(bundle, folder, threads, kv, bar)
        kept = _keep(folder, prepared_folder(root, bundle, ort.__version__, kv))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if kept.record.refused:
        raise BackendError(
            f"{bundle.path}: the backbone cannot be prepared: {kept.record.refused}; {ANYWAY}"
        )
    return kept


def _check_memory(bundle: Bundle, needs: Preparing, memory: int | str | None) -> None:
    own, free = own_memory(), available_memory()
    allowed = own + free if memory is None else min(parse_size(memory), own + free)
    if own + needs.memory > allowed:
        sizes = [format_size(nbytes, up=True) for nbytes in (needs.memory, own)]
        raise BackendError(
            f"{bundle.path}: preparing takes {sizes[0]} of memory beside {sizes[1]} of this process, "
            f"but {format_size(allowed)} may be taken; allow more once, or run stem-edge prepare; {ANYWAY}"
        )


def graph_sources(
    bundle: Bundle, prepared: Prepacked | None, *, prefill: bool, kv: KvType = "fp32"
) -> Mapping[str, Path | GraphSource]:
    """Return the source of each graph by name: its prepared file, otherwise the graph itself."""
    if prepared is None:
        return cpu_graphs(bundle, prefill=prefill, kv=kv)
    folder, record = prepared
    graphs = joined_graphs(bundle, prefill=prefill, kv=kv)
    return graphs | {
        name: folder / prepared_file(name) for name in graphs if prepared_file(name) in record.files
    }


def prepared_file(graph: str) -> str:
    """Return the name of a prepared graph's file."""
    return f"{graph}.onnx"


def packable(bundle: Bundle, kv: KvType = "fp32") -> dict[str, Graph]:
    """Return the graphs with matrices to be packed; an embedding is read in place anyway."""
    graphs = joined_parts(bundle, prefill=bundle.manifest.has_prefill, kv=kv)
    return {name: in_blocks(graph) for name, graph in graphs.items() if name != EMBED}


def _run_worker(bundle: Bundle, folder: Path, threads: int, kv: KvType, bar: Progress) -> None:
    arguments = [str(bundle.path.resolve()), str(folder), str(threads), kv]
    arguments += [] if bundle.tables is None else [bundle.tables]
    command = module_command("stem_edge.runtime.backends.onnxruntime.prepack_worker", *arguments)
    with tempfile.TemporaryFile() as output:
        try:
            worker = subprocess.Popen(command, stdout=output, stderr=output)
        except OSError as error:
            raise BackendError(
                f"{bundle.path}: cannot start {command[0]} to prepare it ({error.strerror}); free "
                "some memory, or load it with prepare=False"
            ) from error
        try:
            seen = 0
            while _still_runs(worker):
                nbytes = _folder_nbytes(folder)
                bar.advance(nbytes - seen)
                seen = nbytes
        finally:
            worker.kill()  # needed only when interrupted; harmless to a process that has ended
            worker.wait()
        output.seek(0)
        ended = Ended(worker.returncode, output.read(), b"")
    if worker.returncode:
        reason = _reason(worker.returncode, ended)
        raise BackendError(f"{bundle.path}: the backbone cannot be prepared: {reason}")


def _reason(status: int, ended: Ended) -> str:
    if ended.crashed:
        return f"its worker process died of {signal_name(status)}; load it with prepare=False"
    return last_line(ended.stdout) if ended.stdout.strip() else f"exit status {status}"


def _still_runs(worker: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(POLL_SECONDS)
    return worker.poll() is None


def _folder_nbytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _keep(made: Path, folder: Path) -> Prepacked:
    """Rename the folder, unless what is there lacks nothing, as when made by another process."""
    there = read_prepared(folder)
    if there is None or there.refused or not (there.steps and there.steps.sure):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            made.rename(folder)
    record = read_prepared(folder)
    if record is None:
        raise BackendError(f"{folder}: cannot keep the prepared backbone there")
    return Prepacked(folder, record)

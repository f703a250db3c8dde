"""The prepared backbone: the graphs rearranged for this very processor, once, and then mapped.

onnxruntime packs matrices into anonymous memory when it loads them, which no system can take back.
It can write what it packed beside the graph instead, and use it from there: the weights of a loaded
model are then pages of a file. That takes as much memory as it will save, once, so another process
does it; and it measures which graph is the faster one for prompts.
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
from typing import Annotated

import msgspec
import onnxruntime as ort

from stem_edge.bundle.manifest import Bundle
from stem_edge.bundle.verdicts import Records
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.graph.names import EMBED
from stem_edge.progress import Progress
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource, cpu_graphs
from stem_edge.system.child import Ended, last_line, module_command, signal_name
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_digest

FORMAT = 4
FOLDER, RECORD = "prepared", "prepared.json"
TEMPORARY = ".making-"  # of a folder that is being filled, or was when that was killed
MAX_RECORD_NBYTES = 1 << 20
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Smaller backbones load in a moment and take little: not worth files in the user's folder.
LEAST_NBYTES = 64 << 20
# The files hold every matrix as it was and as it was packed, and packing pads a little.
FILES_OVER_DATA = 2.2
POLL_SECONDS = 0.1
ANYWAY = "loading it takes longer and more memory, and its answers are right"


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of prepared.json."""

    format: int
    bundle: str  # path of the bundle it was made from
    onnxruntime: str
    cpu: str  # digest of the processor's features
    files: dict[str, tuple[Size, int]]  # size, and time of change in ns: what changed is not ours
    prefill: bool | None  # whether the prefill graph is the faster one; None: there is none
    seconds: dict[str, float]  # graph -> time of a prompt chunk, as measured
    refused: str = ""  # why nothing was prepared, and would not be the next time, either


class NotPrepared(RuntimeWarning):
    """The backbone could not be prepared, so loading takes longer and more memory."""


def find(bundle: Bundle, cache_dir: str | Path | None) -> tuple[Path, Prepared] | None:
    """The prepared backbone of a bundle on this machine, if there is one."""
    folder, record = _place(bundle, cache_dir)
    return None if record is None or record.refused else (folder, record)


def is_worth_it(bundle: Bundle, cache_dir: str | Path | None) -> bool:
    """Whether a load prepares the backbone, or takes what was prepared."""
    _, record = _place(bundle, cache_dir)
    if record is not None:
        return not record.refused
    return matrices_nbytes(bundle) >= LEAST_NBYTES


def find_or_make(
    bundle: Bundle, cache_dir: str | Path | None, threads: int, progress: bool | None
) -> tuple[Path, Prepared] | None:
    """The prepared backbone, made now if it is worth it; None, with a warning, if it cannot be.

    The warning comes once where trying again would end the same way.
    """
    folder, record = _place(bundle, cache_dir)
    if record is not None:
        return None if record.refused else (folder, record)
    if matrices_nbytes(bundle) < LEAST_NBYTES:
        return None
    try:
        return make(bundle, cache_dir, threads, progress)
    except BackendError as error:
        warnings.warn(NotPrepared(str(error)), stacklevel=3)
        return None


def prepared_folder(root: Path, bundle: Bundle, onnxruntime: str) -> Path:
    """Where the prepared backbone of this bundle, processor and onnxruntime is, once it is made."""
    files, graphs = bundle.manifest.files, cpu_graphs(bundle, prefill=bundle.manifest.has_prefill)
    weights = [files[name].sha256 for name in (BACKBONE_DATA, PREFILL_DATA) if name in files]
    built = hashlib.sha256(b"".join(graph.data for graph in graphs.values())).hexdigest()
    described = repr((FORMAT, onnxruntime, cpu_digest(), weights, built))
    return root / FOLDER / hashlib.sha256(described.encode()).hexdigest()[:KEY_CHARS]


def read_prepared(folder: Path) -> Prepared | None:
    """The record of a prepared backbone; None if it is missing, damaged or of another format."""
    try:
        data = disk.read_file(folder / RECORD, MAX_RECORD_NBYTES)
        record = msgspec.json.decode(data, type=Prepared)
        found = {name: marks(folder / name) for name in record.files}
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None
    plain = all(Path(name).name == name for name in record.files)
    return record if record.format == FORMAT and plain and found == record.files else None


def marks(path: Path) -> tuple[int, int]:
    """Size and time of change of a file. Raises OSError."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def _place(bundle: Bundle, cache_dir: str | Path | None) -> tuple[Path, Prepared | None]:
    """Where the prepared backbone of a bundle is on this machine, and its record, if it has one."""
    folder = prepared_folder(cache_folder(cache_dir), bundle, ort.__version__)
    return folder, read_prepared(folder)


def make(
    bundle: Bundle, cache_dir: str | Path | None, threads: int, progress: bool | None = None
) -> tuple[Path, Prepared]:
    """Prepare a backbone, also one that was refused before.

    Raises BackendError when the folder cannot take it, or what was prepared computes something else,
    which is kept; BundleError.
    """
    root = cache_folder(cache_dir)
    # It is kept under the checksums of the files, so they must be the right ones.
    Records(bundle, "onnxruntime", cache_dir).check_place()
    wanted = int(FILES_OVER_DATA * matrices_nbytes(bundle))
    try:
        folder = root / FOLDER / f"{TEMPORARY}{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BackendError(
            f"{root}: cannot keep a prepared backbone there ({error.strerror}); give another folder "
            "with cache_dir"
        ) from error
    try:
        if free < wanted:
            raise BackendError(
                f"{root}: a prepared backbone takes {wanted:,} bytes, {free:,} are free; free some "
                "space, or give another folder with cache_dir"
            )
        with Progress(wanted, "preparing", progress) as bar:
            _run_worker(bundle, folder, threads, bar)
        kept, record = _keep(folder, prepared_folder(root, bundle, ort.__version__))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if record.refused:
        raise BackendError(
            f"{bundle.path}: the backbone cannot be prepared: {record.refused}; {ANYWAY}"
        )
    return kept, record


def matrices_nbytes(bundle: Bundle) -> int:
    """Bytes of the weight files of all graphs."""
    files = bundle.manifest.files
    return sum(files[name].nbytes for name in (BACKBONE_DATA, PREFILL_DATA) if name in files)


def graph_sources(
    bundle: Bundle, prepared: tuple[Path, Prepared] | None, *, prefill: bool
) -> Mapping[str, Path | GraphSource]:
    """Graph -> what to load it from."""
    sources: dict[str, Path | GraphSource] = dict(cpu_graphs(bundle, prefill=prefill))
    if prepared is not None:
        folder, record = prepared
        files = {name: prepared_file(name) for name in sources}
        sources |= {n: folder / file for n, file in files.items() if file in record.files}
    return sources


def prepared_file(graph: str) -> str:
    """Name of a prepared graph's file."""
    return f"{graph}.onnx"


def worth_preparing(bundle: Bundle) -> dict[str, GraphSource]:
    """Graphs with matrices. An embedding is read in place anyway."""
    graphs = cpu_graphs(bundle, prefill=bundle.manifest.has_prefill)
    return {name: graph for name, graph in graphs.items() if name != EMBED}


def _run_worker(bundle: Bundle, folder: Path, threads: int, bar: Progress) -> None:
    arguments = [str(bundle.path.resolve()), str(folder), str(threads)]
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
            worker.kill()  # does nothing to one that has ended
            worker.wait()
        output.seek(0)
        ended = Ended(worker.returncode, output.read(), b"")
    if worker.returncode:
        reason = _reason(worker.returncode, ended)
        raise BackendError(f"{bundle.path}: the backbone cannot be prepared: {reason}")


def _reason(status: int, ended: Ended) -> str:
    if ended.crashed:
        return f"the process that did it ended by {signal_name(status)}; load it with prepare=False"
    return last_line(ended.stdout) if ended.stdout.strip() else f"exit status {status}"


def _still_runs(worker: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(POLL_SECONDS)
    return worker.poll() is None


def _folder_nbytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _keep(made: Path, folder: Path) -> tuple[Path, Prepared]:
    """Give it its name. Somebody else may have made the same meanwhile, or left a damaged one."""
    there = read_prepared(folder)
    if there is None or there.refused:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            made.rename(folder)
    record = read_prepared(folder)
    if record is None:
        raise BackendError(f"{folder}: cannot keep the prepared backbone there")
    return folder, record

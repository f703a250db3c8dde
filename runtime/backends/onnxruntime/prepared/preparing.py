"""Preparing a backbone in a child process, at its first load or by command."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.files.hashing import sha256_of
from stem_edge.files.lock import lock
from stem_edge.files.plain_files import damaged
from stem_edge.files.trees import remove_tree
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.graph.formats import BACKBONE_DATA
from stem_edge.graph.kv import KvType
from stem_edge.progress import Progress, tell
from stem_edge.runtime.backends.memory_plan import Preparing
from stem_edge.runtime.backends.onnxruntime.needs import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    Prepacked,
    prepared_folder,
    read_prepared,
)
from stem_edge.system.child import last_line, module_command, signal_name
from stem_edge.system.memory import available_memory, own_memory
from stem_edge.system.user_folder import cache_folder
from stem_edge.units import format_size, parse_size

WORKER = "stem_edge.runtime.backends.onnxruntime.prepared.prepack_worker"
TEMPORARY = ".making-"  # begins the name of a folder that is being filled, or was until a kill
POLL_SECONDS = 0.1


class NotPrepared(RuntimeWarning):
    """The backbone could not be prepared, so loading takes longer and more memory."""


def prepared_or_none(
    bundle: Bundle,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None,
    kv: KvType,
    memory: int | str | None,
) -> Prepacked | None:
    """Prepare a backbone as `make` does; None, with a warning, if that is impossible.

    A refusal is kept, so that it is warned of only once.
    """
    try:
        return make(bundle, cache_dir, threads, progress, kv, memory)
    except BackendError as error:
        warnings.warn(NotPrepared(str(error)), stacklevel=3)
        return None


def make(
    bundle: Bundle,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None = None,
    kv: KvType = "fp32",
    memory: int | str | None = None,
) -> Prepacked:
    """Prepare a backbone, unless another process does so meanwhile.

    memory: limit on the memory of this process and the one that prepares; default: what is free.
    Raises BundleError; BackendError if memory or disk is too small, or if packed weights give other logits.
    """
    folder = prepared_folder(cache_folder(cache_dir), bundle, ort.__version__, kv)
    needs = preparing_needs(footprint_of(bundle.manifest, "onnxruntime").with_kv(kv), threads)
    _check_memory(bundle, needs, memory)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, progress):
            if (record := read_prepared(folder)) is None:
                _check_weights(bundle)
                _fill(bundle, folder, needs, threads, kv, progress)
                record = read_prepared(folder)
    except OSError as error:
        raise BackendError(
            f"{folder.parent}: cannot keep a prepared backbone there ({error.strerror}); give another "
            "folder with cache_dir"
        ) from error
    if record is None:
        raise BackendError(f"{folder}: the prepared backbone changed meanwhile; load it again")
    if record.refused:
        raise BackendError(f"{bundle.path}: the backbone cannot be prepared: {record.refused}")
    return Prepacked(folder, record)


@contextlib.contextmanager
def _alone(folder: Path, show: bool | None) -> Iterator[None]:
    """Hold the lock of a folder, so that several first loads fill it once. Raises OSError."""
    descriptor, waited = disk.update(folder.with_name(f"{folder.name}.lock")), False
    try:
        while not lock(descriptor):
            if not waited:
                tell("waiting for another process, which prepares the same backbone", show)
            waited = True
            time.sleep(POLL_SECONDS)
        yield
    finally:
        disk.close(descriptor)


def _check_weights(bundle: Bundle) -> None:
    """Raise BundleError if weights do not match the manifest, by whose checksums the result is found."""
    for name in (BACKBONE_DATA, PREFILL_DATA):
        if (entry := bundle.manifest.files.get(name)) is not None:
            found = sha256_of(bundle.file(name), entry.nbytes, lambda nbytes: None)
            if found != entry.sha256:
                raise damaged(bundle.file(name), f"sha256 is {found}, expected {entry.sha256}")


def _fill(
    bundle: Bundle, folder: Path, needs: Preparing, threads: int, kv: KvType, show: bool | None
) -> None:
    """Put a whole prepared backbone into the folder, for the process that holds its lock.

    Raises BackendError, OSError.
    """
    for path in (folder, *folder.parent.glob(f"{TEMPORARY}*-{folder.name}-*")):
        remove(path)  # damaged, or left by a process that was killed
    if (free := shutil.disk_usage(folder.parent).free) < needs.disk:
        raise BackendError(
            f"{folder.parent}: preparing takes {needs.disk:,} bytes, {free:,} are free; free some space, or "
            "give another folder with cache_dir"
        )
    made = folder.with_name(f"{TEMPORARY}{os.getpid()}-{folder.name}-{secrets.token_hex(4)}")
    made.mkdir()
    try:
        with Progress(needs.disk, "preparing for this processor, once", show) as bar:
            _run_worker(bundle, made, threads, kv, bar)
        made.rename(folder)
    finally:
        remove(made)


def _check_memory(bundle: Bundle, needs: Preparing, memory: int | str | None) -> None:
    own, free = own_memory(), available_memory()
    allowed = own + free if memory is None else min(parse_size(memory), own + free)
    if own + needs.memory > allowed:
        sizes = [format_size(nbytes, up=True) for nbytes in (needs.memory, own)]
        weights = format_size(footprint_of(bundle.manifest, "onnxruntime").step_nbytes)
        raise BackendError(
            f"{bundle.path}: preparing takes {sizes[0]} of memory beside {sizes[1]} of this process, "
            f"but {format_size(allowed)} may be taken; allow more once; it still runs correctly, but each "
            f"load takes longer, and {weights} of memory for weights"
        )


def _run_worker(bundle: Bundle, folder: Path, threads: int, kv: KvType, bar: Progress) -> None:
    """Fill the folder in a child process. Raises BackendError."""
    arguments = [str(bundle.path.resolve()), str(folder), str(threads), kv]
    arguments += [] if bundle.tables is None else [bundle.tables]
    command, pipe = module_command(WORKER, *arguments), subprocess.PIPE
    with tempfile.TemporaryFile() as output:
        try:  # its stdin ends with this process, and the worker with it
            worker = subprocess.Popen(command, stdin=pipe, stdout=output, stderr=output)
        except OSError as error:
            raise BackendError(
                f"{bundle.path}: cannot start {command[0]} to prepare it ({error.strerror}); free some memory"
            ) from error
        with worker:
            try:
                seen = 0
                while worker.poll() is None:
                    nbytes = _nbytes(folder)
                    bar.advance(nbytes - seen)
                    seen = nbytes
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.wait(POLL_SECONDS)
            finally:
                worker.kill()  # needed only when interrupted; harmless to a process that has ended
        output.seek(0)
        if worker.returncode:
            reason = _reason(worker.returncode, output.read())
            raise BackendError(f"{bundle.path}: the backbone cannot be prepared: {reason}")


def _reason(status: int, said: bytes) -> str:
    if status < 0:
        return f"its process died of {signal_name(status)}, as where memory is short"
    return last_line(said) if said.strip() else f"exit status {status}"


def remove(folder: Path) -> None:
    """Delete a prepared backbone, if it is there."""
    with contextlib.suppress(OSError):
        remove_tree(folder, folder.parent)


def is_left(made: Path) -> bool:
    """True if the process that was filling a folder of this name is gone."""
    import psutil  # here, to keep its 10 ms out of every start

    number = made.name.removeprefix(TEMPORARY).partition("-")[0]
    return not number.isdigit() or not psutil.pid_exists(int(number))


def _nbytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, of which some may go meanwhile."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0

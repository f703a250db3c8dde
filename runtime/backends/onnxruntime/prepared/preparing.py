"""Preparing a backbone in a child process, at its first load or by command."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import warnings
from pathlib import Path

import onnxruntime as ort

from stem_edge.bundle.checksums import check_hashes
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import weight_files
from stem_edge.errors import BackendError
from stem_edge.files.trees import remove_tree
from stem_edge.graph.kv import KvType
from stem_edge.progress import Progress
from stem_edge.runtime.backends.memory_plan import Preparing
from stem_edge.runtime.backends.onnxruntime.prepared.folder import begin, folder_nbytes, leave
from stem_edge.runtime.backends.onnxruntime.prepared.packable import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    Prepacked,
    PreparedPlace,
    prepared_folder,
    read_prepared,
)
from stem_edge.system.child import Ended, last_line, module_command, signal_name
from stem_edge.system.memory import available_memory, own_memory
from stem_edge.system.user_folder import cache_folder
from stem_edge.units import format_size, parse_size

POLL_SECONDS = 0.1


class NotPrepared(RuntimeWarning):
    """The backbone could not be prepared, so loading takes longer and more memory."""


def find_or_make(
    found: PreparedPlace,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None,
    kv: KvType = "fp32",
    memory: int | str | None = None,
) -> Prepacked | None:
    """Return the prepared backbone, making it now if worth it; None, with a warning, on failure.

    A failure that would happen again is recorded, so that it is warned of only once.
    """
    found = found._replace(record=read_prepared(found.folder))  # another process may have made it
    if found.record is not None or not found.is_worth_it:
        return found.prepared
    try:
        return make(found.bundle, cache_dir, threads, progress, kv, memory)
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
    """Prepare a backbone, also one that was refused before.

    memory: limit on the memory of this process and the one that prepares; default: what is free.
    Raises BundleError; BackendError if memory or the cache folder is too small, or if it computes
    other logits, which is recorded.
    """
    root = cache_folder(cache_dir)
    needs = preparing_needs(footprint_of(bundle.manifest, "onnxruntime").with_kv(kv), threads)
    _check_memory(bundle, needs, memory)
    # The result is found by the checksums in the manifest, so it must be made of these very files.
    check_hashes(bundle, weight_files(bundle.manifest))
    target = prepared_folder(root, bundle, ort.__version__, kv)
    folder = begin(root, target.name, needs.disk)
    try:
        with Progress(needs.disk, "preparing for this processor, once", progress) as bar:
            ended = _run_worker(bundle, folder, threads, kv, bar)
        if ended.status:
            reason = _reason(ended)
            raise BackendError(f"{bundle.path}: the backbone cannot be prepared: {reason}")
        kept = _keep(folder, target)
    except BaseException:
        leave(folder, needs.disk)
        raise
    finally:
        with contextlib.suppress(OSError):
            remove_tree(folder, target.parent)
    if kept.record.refused:
        raise BackendError(
            f"{bundle.path}: the backbone cannot be prepared: {kept.record.refused}; {_anyway(bundle)}"
        )
    return kept


def _check_memory(bundle: Bundle, needs: Preparing, memory: int | str | None) -> None:
    own, free = own_memory(), available_memory()
    allowed = own + free if memory is None else min(parse_size(memory), own + free)
    if own + needs.memory > allowed:
        sizes = [format_size(nbytes, up=True) for nbytes in (needs.memory, own)]
        raise BackendError(
            f"{bundle.path}: preparing takes {sizes[0]} of memory beside {sizes[1]} of this process, "
            f"but {format_size(allowed)} may be taken; allow more once; {_anyway(bundle)}"
        )


def _anyway(bundle: Bundle) -> str:
    weights = format_size(footprint_of(bundle.manifest, "onnxruntime").step_nbytes)
    return (
        f"it still runs correctly, but each load takes longer, and {weights} of memory for weights"
    )


def _run_worker(bundle: Bundle, folder: Path, threads: int, kv: KvType, bar: Progress) -> Ended:
    arguments = [str(bundle.path.resolve()), str(folder), str(threads), kv]
    arguments += [] if bundle.tables is None else [bundle.tables]
    command = module_command(
        "stem_edge.runtime.backends.onnxruntime.prepared.prepack_worker", *arguments
    )
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
                nbytes = folder_nbytes(folder)
                bar.advance(nbytes - seen)
                seen = nbytes
        finally:
            worker.kill()  # needed only when interrupted; harmless to a process that has ended
            worker.wait()
        output.seek(0)
        return Ended(worker.returncode, output.read(), b"")


def _reason(ended: Ended) -> str:
    if ended.crashed:
        return (
            f"its worker process died of {signal_name(ended.status or 0)}; another attempt goes on from there, "
            "or load it with prepare=False"
        )
    return last_line(ended.stdout) if ended.stdout.strip() else f"exit status {ended.status}"


def _still_runs(worker: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(POLL_SECONDS)
    return worker.poll() is None


def _keep(made: Path, folder: Path) -> Prepacked:
    """Rename the folder, unless what is there lacks nothing, as when made by another process."""
    there = read_prepared(folder)
    if there is None or there.refused or not (there.steps and there.steps.sure):
        with contextlib.suppress(OSError):
            remove_tree(folder, made.parent)
        with contextlib.suppress(OSError):
            made.rename(folder)
    record = read_prepared(folder)
    if record is None:
        raise BackendError(f"{folder}: cannot keep the prepared backbone there")
    return Prepacked(folder, record)

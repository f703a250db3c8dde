"""Saves a backbone with weights repacked for this processor, at its first load or by `stem-edge prepare`."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from functools import partial
from pathlib import Path

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.files.lock import alone
from stem_edge.files.trees import remove_tree
from stem_edge.graph.kv import KvType
from stem_edge.progress import tell
from stem_edge.runtime.backends.onnxruntime.prepared.deciding import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    Prepacked,
    prepared_folder,
    read_prepared,
)
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.shown import format_size
from stem_edge.system.child import last_line, module_command, run_worker, signal_name

WORKER = "stem_edge.runtime.backends.onnxruntime.prepared.prepack_worker"
TEMPORARY = ".making-"  # prefix of folders that are being filled, or were until a kill


def make_or_warn(
    bundle: Bundle, options: LoadOptions, kv: KvType, obstacle: str
) -> Prepacked | None:
    """Save a backbone with repacked weights; if that fails, or if there is an obstacle, warn and return None."""
    try:
        if obstacle:
            raise BackendError(obstacle)
        return make(bundle, options.cache_dir, options.cpus, options.progress, kv)
    except BackendError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=5)
        return None


def make(
    bundle: Bundle,
    cache_dir: str | Path | None,
    threads: int,
    progress: bool | None = None,
    kv: KvType = "fp32",
) -> Prepacked:
    """Save a backbone with repacked weights, or wait for another process that saves it. Raises BackendError."""
    folder = prepared_folder(cache_dir, bundle, kv)
    needed = preparing_needs(footprint_of(bundle.manifest).with_kv(kv), threads).disk
    room = format_size(needed, up=True)
    waiting = partial(
        tell, "waiting for another process, which prepares the same backbone", progress
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_name(f"{folder.name}.lock"), waiting):
            if (found := read_prepared(folder)) is None:
                if (free := shutil.disk_usage(folder.parent).free) < needed:
                    raise BackendError(
                        f"{folder.parent}: preparing takes {room}, {format_size(free)} "
                        "are free; free some space, or give another folder with cache_dir"
                    )
                tell(f"preparing for this processor, once, in up to {room} of disk", progress)
                _fill(bundle, folder, threads, kv, room)
                found = read_prepared(folder)
    except OSError as error:
        raise BackendError(
            f"{folder.parent}: cannot keep a prepared backbone there ({error.strerror}); give another "
            "folder with cache_dir"
        ) from error
    if found is None:
        raise BackendError(f"{folder}: the prepared backbone changed meanwhile; load it again")
    return found


def _fill(bundle: Bundle, folder: Path, threads: int, kv: KvType, room: str) -> None:
    """Create a folder of repacked weights, of size `room`; failures leave none. Raises BackendError, OSError."""
    made = folder.with_name(TEMPORARY + folder.name)
    for path in (folder, made):
        remove(path)  # damaged, or left by a process that was killed
    made.mkdir()
    try:
        _run_worker(bundle, made, threads, kv, room)
        made.rename(folder)
    finally:
        remove(made)


def _run_worker(bundle: Bundle, folder: Path, threads: int, kv: KvType, room: str) -> None:
    arguments = [str(bundle.path.resolve()), str(folder), str(threads), kv]
    arguments += [] if bundle.tables is None else [bundle.tables]
    command = module_command(WORKER, *arguments)
    try:
        status, said = run_worker(command)
    except OSError as error:
        raise BackendError(
            f"{bundle.path}: cannot start {command[0]} to prepare it ({error.strerror}); free some memory"
        ) from error
    if status:
        reason = last_line(said) if status > 0 else f"it died of {signal_name(status)}"
        left = format_size(shutil.disk_usage(folder).free)
        raise BackendError(
            f"{bundle.path}: the backbone cannot be prepared: {reason}; this takes up to {room} in "
            f"{folder.parent}, where {left} are left"
        )


def remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        remove_tree(folder, folder.parent)

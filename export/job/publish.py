"""Publishes a finished bundle atomically: the old bundle stays whole until the new one is complete.

A new bundle grows in a working folder beside its target. It takes the target's name only when all
its files and folders have been fsynced. A killed export leaves the working folder; the next
export to the same target removes it and begins again.

A power cut may lose file contents and names that were not fsynced. Therefore each step is synced before
the next one: contents of files, their names, the new folder's name. Then the old bundle is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stem_edge.bundle.absent import OLD, WORKING
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import ExportError
from stem_edge.files import disk
from stem_edge.files.lock import lock
from stem_edge.files.trees import make_folders, remove_tree
from stem_edge.shown import format_size

LOCK = ".lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MORE_ROOM = "free some space, or choose another disk (with --cache-dir, if this is the cache)"


@contextlib.contextmanager
def publish(
    out: Path, kind: str, is_ours: Callable[[Path], bool], *, force: bool
) -> Iterator[Path]:
    """Yield a new folder. It becomes `out` if the `with` block succeeds; else it is deleted.

    is_ours: returns True for a folder that `force` may replace. kind: such a folder, in messages.

    Raises ExportError if `out` exists and `force` is not set, if `out` is not of this kind (it is then not deleted,
    even with force), if another export to it is running, or if the disk is full or fails. `out` is then unchanged.
    """
    _check_target(out, force, kind, is_ours)
    with _locked(out), _explained(out):
        _recover(out)
        # Checked again, because _recover or another process may have created `out` since.
        _check_target(out, force, kind, is_ours)
        work = out.with_name(WORKING + out.name)
        if work.is_dir():
            # It may be an old bundle. Until this sync, a power cut could rename it back to `out`.
            disk.sync_folder(out.parent)
            remove_tree(work, out.parent)
        make_folders(work)
        unfinished = True
        try:
            yield work
            below = sorted(path for path in work.rglob("*") if path.is_dir())
            for folder in (*below, work):  # file contents are synced already; this syncs names
                disk.sync_folder(folder)
            unfinished = False  # from here on, `work` may name the old bundle: do not delete it
            _take_place(work, out)
        finally:
            if unfinished:
                with contextlib.suppress(OSError):
                    remove_tree(work, out.parent)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock out other exports to `out` during the `with` block; create its parent folder.

    Raises ExportError if another export is running. The system frees the lock of a killed process.
    """
    file = out.with_name(WORKING + out.name + LOCK)
    try:
        _make_durable(out.parent)
        descriptor = disk.update(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExportError(
            f"{out.parent}: cannot write here ({reason}); check its permissions, or choose another "
            "folder"
        ) from error
    try:
        if not lock(descriptor) or not os.fstat(descriptor).st_nlink:  # no link: it just ended
            raise ExportError(
                f"{out}: another export to it is running; wait for it, or choose another folder"
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows cannot delete a file that is open
                file.unlink()  # before closing; later, the name may be another export's
    finally:
        disk.close(descriptor)


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to an ExportError with advice for the user."""
    try:
        yield
    except OSError as error:
        place, reason = error.filename or out, error.strerror or str(error)
        if error.errno not in DISK_FULL:
            raise ExportError(
                f"{place}: cannot write ({reason}); check its storage device, permissions and limit (ulimit -f), "
                "then export again"
            ) from error
        raise ExportError(
            f"{out}: the disk is full ({reason}; {format_size(free_nbytes(out))} free); {MORE_ROOM}"
        ) from error


def free_nbytes(out: Path) -> int:
    return shutil.disk_usage(out.parent).free


def check_free(out: Path, needed: int) -> None:
    free = free_nbytes(out)
    if free < needed:
        raise ExportError(
            f"{out}: not enough room on its disk: {format_size(needed, up=True)} needed, "
            f"{format_size(free)} free; {MORE_ROOM}"
        )


def check_apart(out: str | Path, paths: Sequence[str | Path | None]) -> None:
    """Raise ExportError if replacing `out` would delete one of the input `paths`."""
    place = Path(out).resolve()
    if not place.exists():
        return
    for path in paths:
        if path is None or not Path(path).exists():
            continue
        real = Path(path).resolve()
        if any(above.samefile(place) for above in (real, *real.parents)):
            raise ExportError(
                f"{out}: is or holds {path}, which the export reads; choose another place to export to"
            )


def _check_target(out: Path, force: bool, kind: str, is_ours: Callable[[Path], bool]) -> None:
    """Raise ExportError if `out` exists, unless `force` and is_ours(out). kind: what is_ours accepts, for the error."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportError(
            f"{out}: already exists; choose another folder, or replace it with --force"
        )
    if out.is_symlink() or not is_ours(out):
        raise ExportError(
            f"{out}: exists and is not {kind}; choose another folder: --force replaces nothing else"
        )


def is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path.is_dir() and not any(path.iterdir()))


def _recover(out: Path) -> None:
    """Finish or undo a replacement of `out` that a killed export began."""
    aside = _aside(out)
    if not aside.is_dir():
        return
    disk.sync_folder(out.parent)  # otherwise a power cut could undo the rename that we see
    if out.exists():
        remove_tree(aside, out.parent)
        return
    disk.rename(aside, out)
    disk.sync_folder(out.parent)


def _aside(out: Path) -> Path:
    return out.with_name(WORKING + out.name + OLD)


def _make_durable(folder: Path) -> None:
    """Create a folder and its missing parents, and fsync their names."""
    if not folder.is_dir():
        _make_durable(folder.parent)
        make_folders(folder)
        disk.sync_folder(folder.parent)


def _take_place(new: Path, out: Path) -> None:
    """Replace the folder `out` by `new` with renames that survive a power cut, then delete the old folder.

    If a rename or sync fails, raises the error and undoes the renames, if the disk allows it. It then deletes
    neither folder, because after a power cut either one may have the name `out`.
    """
    old, done = _aside(out) if out.exists() else None, list[tuple[Path, Path]]()
    # The old folder is renamed first, because a rename cannot replace a folder.
    names = [(new, out)] if old is None else [(out, old), (new, out)]
    try:
        for source, target in names:
            disk.rename(source, target)
            done.append((target, source))
        disk.sync_folder(out.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            for source, target in reversed(done):
                disk.rename(source, target)
        raise
    if old is not None:
        with contextlib.suppress(OSError):  # the next export tries again
            remove_tree(old, old.parent)

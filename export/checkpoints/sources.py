"""Checks that the files an export reads are not those it replaces, and do not change meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from stem_edge.errors import CheckpointError, ExportError
from stem_edge.files.checkpoint_files import read_files, split_files


def states_of(paths: Sequence[str | Path | None]) -> dict[Path, tuple[int, ...]]:
    """Return the state of each file that an export may read. paths: files, and folders of such files."""
    given = _real(paths)
    inside = {file for path in given for file in (path, *read_files(path))}
    return {file: state for file in sorted(inside) if (state := _state(file)) is not None}


def check_unchanged(
    before: Mapping[Path, tuple[int, ...]],
    paths: Sequence[str | Path | None],
    written: Sequence[Path],
) -> None:
    """Raise CheckpointError if a file among `paths`, or inside one, was changed or removed.

    before: states of the files when the export began; written: what it writes itself, which is left out.
    """
    within, own = set(_real(paths)), set(_real(written))
    for file, state in before.items():
        around = {file, *file.parents}
        if around & within and not around & own and (after := _state(file)) != state:
            raise CheckpointError(
                f"{file}: was {'removed' if after is None else 'changed'} during the export; "
                "nothing was written: wait until training or copying has ended, and export again"
            )


def _real(paths: Sequence[str | Path | None]) -> list[Path]:
    """Resolve links and `..`, so that paths to the same place are equal; add the rest of split files."""
    each = [file for path in paths if path is not None for file in split_files(Path(path))]
    return [Path(os.path.realpath(path)) for path in each]


def _state(path: Path) -> tuple[int, ...] | None:
    """Return size, time of change, device and inode; None if it is not a regular file."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def check_apart(out: str | Path, paths: Sequence[str | Path | None]) -> None:
    """Raise ExportError if an export would replace what it reads, or a folder around it."""
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

"""What an export reads: that it is not what the export replaces, and that it stays the same meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stem_edge.errors import CheckpointError, ExportError

# Of models, tokenizers and adapters; logs of a run that goes on in the same folder may grow.
SUFFIXES = {
    *(".safetensors", ".pth", ".pt", ".distcp", ".json", ".model", ".jinja"),
    *(".npy", ".int32", ".txt"),
}
INDEX = ".metadata"


class _State(NamedTuple):
    """By which a changed file is known."""

    nbytes: int
    changed_ns: int
    file: tuple[int, int]  # device and inode: another file of the same size and time


class Sources:
    """Files that an export may read, as they were when it began."""

    def __init__(self, paths: Sequence[str | Path | None]) -> None:
        """paths: files, and folders with all that is in them."""
        given = [Path(path) for path in paths if path is not None]
        inside = {file for path in given for file in (path, *path.rglob("*"))}
        self._before = {
            file: state
            for file in sorted(inside)
            if (file.suffix in SUFFIXES or file.name == INDEX or file in given)
            and (state := _state(file)) is not None
        }

    def check(self, used: Sequence[str | Path | None], written: Sequence[Path]) -> None:
        """Raises CheckpointError if a file was changed or removed since.

        used: which of them were read, files and folders; written: what the export itself writes,
        which may lie in one of these.
        """
        within = {Path(path) for path in used if path is not None}
        for file, before in self._before.items():
            around = {file, *file.parents}
            if within.isdisjoint(around) or not around.isdisjoint(written):
                continue
            if (after := _state(file)) != before:
                raise CheckpointError(
                    f"{file}: was {'removed' if after is None else 'changed'} while it was exported; "
                    "nothing was written: wait until training or copying has ended, and export again"
                )


def _state(path: Path) -> _State | None:
    """Of a file; None if it is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not path.is_file():
        return None
    return _State(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


def check_apart(out: str | Path, paths: Sequence[str | Path | None]) -> None:
    """Raises ExportError if what an export replaces is, or holds, what it reads."""
    place = os.path.realpath(out)
    for path in paths:
        if path is None or not Path(path).exists():
            continue
        real = Path(os.path.realpath(path))
        if any(str(above) == place or _same(above, out) for above in (real, *real.parents)):
            raise ExportError(
                f"{out}: is or holds {path}, which the export reads; choose another place for it"
            )


def _same(one: Path, other: str | Path) -> bool:
    """Whether both are there and the same, whatever case their names have."""
    try:
        return one.samefile(other)
    except OSError:
        return False

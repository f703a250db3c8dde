"""The files that an export reads: they are not those that it replaces, and stay the same meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from stem_edge.errors import CheckpointError, ExportError

# Of models, tokenizers and adapters; logs of a run that goes on in the same folder may grow.
SUFFIXES = {
    *(".safetensors", ".pth", ".pt", ".distcp", ".json", ".model", ".jinja"),
    *(".npy", ".int32", ".txt"),
}
INDEX = ".metadata"


class Sources:
    """Files that an export may read, as they were when it began."""

    def __init__(self, paths: Sequence[str | Path | None]) -> None:
        """paths: files, and folders with all that is in them."""
        given = _real(paths)
        inside = {file for path in given for file in (path, *path.rglob("*"))}
        self._before = {
            file: state
            for file in sorted(inside)
            if (file.suffix in SUFFIXES or file.name == INDEX or file in given)
            and (state := _state(file)) is not None
        }

    def used(
        self, paths: Sequence[str | Path | None], written: Sequence[Path]
    ) -> dict[Path, tuple[int, ...]]:
        """Those that are these files or lie in these folders, with size and time of change.

        written: what the export itself writes, which may lie there, too.
        """
        within, own = set(_real(paths)), set(_real(written))
        return {
            file: state[:2]
            for file, state in self._before.items()
            if (around := {file, *file.parents}) & within and not around & own
        }

    def check(self, paths: Sequence[str | Path | None], written: Sequence[Path]) -> None:
        """Raises CheckpointError if one of used(paths, written) was changed or removed since."""
        for file in self.used(paths, written):
            if (after := _state(file)) != self._before[file]:
                raise CheckpointError(
                    f"{file}: was {'removed' if after is None else 'changed'} while it was exported; "
                    "nothing was written: wait until training or copying has ended, and export again"
                )


def _real(paths: Sequence[str | Path | None]) -> list[Path]:
    """Paths that compare as the places do, however links and `..` spell them."""
    return [Path(os.path.realpath(path)) for path in paths if path is not None]


def _state(path: Path) -> tuple[int, ...] | None:
    """Size, time of change, device and inode; None if it is no regular file."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def check_apart(out: str | Path, paths: Sequence[str | Path | None]) -> None:
    """Raises ExportError if what an export replaces is, or holds, what it reads."""
    place = Path(out).resolve()
    if not place.exists():
        return
    for path in paths:
        if path is None or not Path(path).exists():
            continue
        real = Path(path).resolve()
        if any(above.samefile(place) for above in (real, *real.parents)):
            raise ExportError(
                f"{out}: is or holds {path}, which the export reads; choose another place for it"
            )

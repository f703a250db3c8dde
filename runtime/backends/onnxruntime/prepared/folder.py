"""The folder of a prepared backbone, and what a killed attempt left there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from stem_edge.errors import BackendError
from stem_edge.files.trees import remove_tree
from stem_edge.runtime.backends.onnxruntime.prepared.looking import FOLDER

JOURNAL = "journal"
# Prefixes of a folder that is being filled, or was when its maker was killed; and of one inside it.
TEMPORARY, MATRIX = ".making-", "matrix-"


def begin(root: Path, key: str, nbytes: int) -> Path:
    """Return a folder to be filled, with what an attempt before left if that failed or was killed.

    Raises BackendError.
    """
    folder = root / FOLDER / f"{TEMPORARY}{os.getpid()}-{key}-{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        left = [path for path in folder.parent.glob(f"{TEMPORARY}*-{key}-*") if is_left(path)]
        free, there = shutil.disk_usage(folder.parent).free, sum(map(folder_nbytes, left[:1]))
        if free + there < nbytes:
            raise BackendError(
                f"{root}: a prepared backbone takes {nbytes:,} bytes, {free + there:,} are free; free "
                "some space, or give another folder with cache_dir"
            )
        # Another process may have taken it; on Windows, one that was left alone may have it open.
        with contextlib.suppress(OSError):
            for path in left[:1]:
                path.rename(folder)
        folder.mkdir(exist_ok=True)
        for path in folder.glob(f"{MATRIX}*"):
            remove_tree(path, folder)
    except OSError as error:
        raise BackendError(
            f"{root}: cannot keep a prepared backbone there ({error.strerror}); give another "
            "folder with cache_dir"
        ) from error
    return folder


def leave(folder: Path, nbytes: int) -> None:
    """Leave packed matrices for another attempt, unless the disk is full."""
    _, key, token = folder.name.removeprefix(TEMPORARY).split("-")
    with contextlib.suppress(OSError):
        room = shutil.disk_usage(folder).free + folder_nbytes(folder)
        if (folder / JOURNAL).exists() and room >= nbytes:
            folder.rename(folder.with_name(f"{TEMPORARY}left-{key}-{token}"))


def is_left(folder: Path) -> bool:
    """Return whether the process that was filling a folder is gone."""
    import psutil  # here, to keep its 10 ms out of every start

    number = folder.name.removeprefix(TEMPORARY).partition("-")[0]
    return not number.isdigit() or not psutil.pid_exists(int(number))


def folder_nbytes(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0

"""The prefix cache on disk: a folder of files with the KV caches of prompts, for later runs.

The least recently used files are evicted. If the folder or a file is faulty, the prompt is computed instead.
Several processes may share a folder: a file gets its name, a digest of model, options and token ids, when complete.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy.typing as npt

from stem_edge.bundle.manifest import digest
from stem_edge.files import disk
from stem_edge.files.trees import make_folders
from stem_edge.runtime.backends.context import PromptKey
from stem_edge.runtime.backends.interface import BackendContext, Resumes
from stem_edge.runtime.prefixes.file import (
    PREFIX_NAME,
    TEMPORARY_NAME,
    PrefixFile,
    UnusableError,
    is_own,
    write_prefix,
)
from stem_edge.runtime.prefixes.reuse import reusable, same_start
from stem_edge.shown import format_size

FOLDER = "prefixes"  # in the user's cache folder
# Shorter prompts take about as long to compute as to read, or so little time that it does not matter.
LEAST_TOKENS = 128
LIMIT_NBYTES = 2 << 30
UNFINISHED_SECONDS = 3600  # no process is still writing a temporary file that is older
MOST_FILES = 4096


class PrefixFolder:
    """The prefix files that a loaded model can use: those whose names begin with its key.

    key: a digest of everything on which keys and values depend, except token ids. The size limit covers
    prefix files of all keys. Other files are neither counted nor touched.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._known: dict[Path, PromptKey] | None = None
        self._lock = threading.RLock()  # several threads may generate

    def find(self, prompt: PromptKey, resumes: Resumes, more_than: int) -> tuple[Path, int] | None:
        """Return the file with most reusable tokens of a prompt, and their number; None if too few.

        A file needs at least `more_than` + LEAST_TOKENS reusable tokens.
        """
        best = None
        if len(prompt.token_ids) < LEAST_TOKENS:
            return None
        with self._lock:
            files = dict(self._files())
        for path, kept in files.items():
            tokens = reusable(kept, len(kept.token_ids), prompt, resumes)
            if tokens >= max(LEAST_TOKENS, more_than + LEAST_TOKENS):
                best, more_than = (path, tokens), tokens
        return best

    def read(self, path: Path, tokens: int, context: BackendContext) -> bool:
        """Copy keys and values of a file's first tokens to an empty context; False if that fails.

        After False, the contents of the context are undefined.
        """
        with self._lock:
            try:
                with disk.opened(path) as descriptor:
                    file = PrefixFile(descriptor)
                    if not file.own or not file.fits(context.kept(tokens)):
                        raise UnusableError(
                            "another user's file, or keys and values of another form"
                        )
                    context.restore((array[..., :tokens, :] for array in file.arrays()), tokens)
                os.utime(path)  # the time of its last use
                return True
            except (OSError, UnusableError) as error:
                self._files().pop(path, None)
                if isinstance(error, UnusableError):
                    _remove_own(path)
                return False

    def write(self, prompt: PromptKey, computed: int, context: BackendContext) -> None:
        """Save the KV cache of a prompt's first `computed` tokens, if enough and not yet saved.

        What is saved ends before the first token that looks up another token's row. Nothing is saved if a
        sliding window of `context` has dropped some of the tokens.
        """
        count = min([computed, *prompt.lookups])
        count -= count % 2
        if count >= LEAST_TOKENS and (arrays := context.kept(count)):
            with self._lock:
                self._write(PromptKey(list(prompt.token_ids[:count]), {}, prompt.starts), arrays)

    def _write(self, written: PromptKey, arrays: list[npt.NDArray[Any]]) -> None:
        known = self._files()
        if any(_has(kept, written) for kept in known.values()):
            return
        path = self._path / f"{self._key}-{digest(written.token_ids)}.prefix"
        nbytes = sum(array.nbytes for array in arrays)
        try:
            if nbytes > LIMIT_NBYTES or not self._is_private(make=True):
                return
            self._make_room(nbytes)
            write_prefix(path, written, arrays)
        except OSError as error:
            self._warn(f"{error.strerror or error}; this prompt takes {format_size(nbytes)}")
            return
        for older in [other for other, kept in known.items() if _has(written, kept)]:
            if older != path:
                _remove_own(older)
                del known[older]
        known[path] = written

    def _files(self) -> dict[Path, PromptKey]:
        """Return the usable files and their prompts. The first call reads the folder."""
        if self._known is None:
            self._known = {}
            with suppress(OSError):
                if self._is_private():
                    self._known = dict(self._scan())
        return self._known

    def _scan(self) -> Iterator[tuple[Path, PromptKey]]:
        for path in islice(self._path.glob(f"{self._key}-*"), MOST_FILES):
            if not PREFIX_NAME.fullmatch(path.name):
                continue
            try:
                with disk.opened(path) as descriptor:
                    file = PrefixFile(descriptor)
            except UnusableError:
                _remove_own(path)
            except OSError:
                continue
            else:
                if file.own:
                    yield path, file.prompt

    def _is_private(self, *, make: bool = False) -> bool:
        """True if only this user can write to the folder. make: create it if missing. Raises OSError."""
        if make and not self._path.exists():
            make_folders(self._path.parent)
            with suppress(FileExistsError):
                self._path.mkdir(0o700)
        if not make and not os.path.lexists(self._path):
            return False
        found = self._path.lstat()
        if stat.S_ISDIR(found.st_mode) and is_own(found):
            return True
        self._warn("it is not a folder that only its user can write to")
        return False

    def _make_room(self, nbytes: int) -> None:
        """Delete unfinished files, and least recently used files until `nbytes` more bytes fit."""
        found, old = list[tuple[float, int, Path]](), time.time() - UNFINISHED_SECONDS
        for path in self._path.iterdir():
            with suppress(OSError):
                about = path.lstat()
                if TEMPORARY_NAME.fullmatch(path.name) and about.st_mtime < old:
                    _remove_own(path)
                elif PREFIX_NAME.fullmatch(path.name):
                    found.append((about.st_mtime, about.st_size, path))
        total = nbytes + sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= LIMIT_NBYTES:
                break
            _remove_own(path)
            self._files().pop(path, None)
            total -= size

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self._path}: prompts are not kept here ({reason})", stacklevel=2)


def _has(longer: PromptKey, prompt: PromptKey) -> bool:
    """True if `longer` starts with the tokens of `prompt`, computed in the same first steps."""
    count = len(prompt.token_ids)
    steps = sum(at < count for at in prompt.starts) - 1
    alike = same_start(longer.starts, prompt.starts) >= steps
    return alike and same_start(longer.token_ids, prompt.token_ids) == count


def _remove_own(path: Path) -> None:
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and is_own(found):
            disk.remove(path)

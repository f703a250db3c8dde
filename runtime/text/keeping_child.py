"""Keeping of a checked tokenizer by a process of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stem_edge.system.child import module_command, run_child
from stem_edge.system.memory import own_memory

SECONDS = 600  # for the process that checks one


def keep_by_child(path: Path, vocab_size: int | None, kept: Path, limit: int | None) -> None:
    """Check and keep a tokenizer in a process of its own, because 10 to 20 MB of that would stay with this one.

    limit: on the memory of both processes.
    """
    if writable(kept.parent):
        left = "" if limit is None else str(max(0, limit - own_memory()))
        given = str(path.absolute()), str(vocab_size or ""), str(kept), left
        with contextlib.suppress(OSError):
            run_child(module_command("stem_edge.runtime.text.keeping", *given), SECONDS)


def writable(folder: Path) -> bool:
    """Return whether files can be written to a folder, which is made if it is not there."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK)

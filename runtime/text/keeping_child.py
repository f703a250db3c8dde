"""Writes the tokenizer cache file in a child process."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from stem_edge.system.child import module_command
from stem_edge.system.memory import own_memory

SECONDS = 600  # timeout of the child process
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def keep_by_child(path: Path, vocab_size: int | None, kept: Path, limit: int | None) -> None:
    """Write the tokenizer cache file in a child process, which frees all memory at its end.

    limit: most bytes of memory that both processes together may take.
    """
    if writable(kept.parent):
        left = "" if limit is None else str(max(0, limit - own_memory()))
        given = str(path.absolute()), str(vocab_size or ""), str(kept), left
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                module_command("stem_edge.runtime.text.keeping", *given),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
                timeout=SECONDS,
                check=False,
            )


def writable(folder: Path) -> bool:
    """True if files can be written to a folder. Makes the folder if it is missing."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False

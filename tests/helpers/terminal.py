"""A process at a terminal: what it shows, and keys that are pressed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

SECONDS = 60.0  # that a text may take to show
# Becomes the command, with a terminal of its own, and with Ctrl-C also where the tests run in the
# background of a shell, which ignores it.
AT_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.login_tty(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
# Python's readline misses a signal between its prompt and its first wait.
PAUSE_SECONDS = 0.2
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal, which sends it Ctrl-C."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, str(theirs), *command],
            env={**os.environ, "TERM": "xterm", **(environment or {})},
            pass_fds=[theirs],
        )
        os.close(theirs)
        self.shown = ""  # all that it has shown

    def press(self, keys: str) -> None:
        """Type, Ctrl-C no sooner than a person can."""
        if CTRL_C in keys:
            time.sleep(PAUSE_SECONDS)
        os.write(self._ours, keys.encode())

    def until(self, text: str) -> str:
        """Wait until it shows a text; return what it showed since the last call, up to that."""
        end, new = time.monotonic() + SECONDS, ""
        while text not in new:
            ready = select.select([self._ours], [], [], max(end - time.monotonic(), 0))[0]
            assert ready, f"no {text!r} after {new!r}"
            new += os.read(self._ours, 1).decode("latin-1")
        self.shown += new
        return new

    def status(self) -> int:
        """Wait for its end, and return its exit status."""
        while True:
            try:
                if not (data := os.read(self._ours, 1024)):
                    break
            except OSError:  # Linux says so when the other end is closed
                break
            self.shown += data.decode("latin-1")
        return self._process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

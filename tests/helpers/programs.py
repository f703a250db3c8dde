"""A process that runs lines of Python on request, to measure its memory in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 64 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports memory by mapping")
# Answers after each line, so that a test knows what has run between two measurements.
PROGRAM = """
import mmap, sys, time
held = []
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
# Needed because a shell makes background jobs and their children ignore Ctrl-C.
HEEDING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from stem_edge.commands.main import main
sys.exit(main())
"""


class Program:
    """A process that runs lines of Python on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.do("pass")  # so that its imports are over

    def do(self, line: str) -> None:
        """Run a line and wait until it is done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def map_file(self, path: Path, access: str = "ACCESS_READ") -> None:
        """Map a file and read every page."""
        self.do(
            f"f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.{access})"
        )
        self.do("m[::4096]")

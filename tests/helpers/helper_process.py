"""A helper process that answers each line of JSON with another line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
# A process that forks, or whose memory is measured, must not have threads of numpy.
VARIABLES = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class HelperProcess:
    """A script of this folder, started on the first question and again after it has ended."""

    def __init__(self, script: str, stderr: Path, *arguments: str | Path) -> None:
        self._command = [sys.executable, str(HERE / script), *map(str, arguments)]
        self._stderr = stderr
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, told: object, seconds: float) -> dict[str, Any]:
        """Ask and return the answer. Fails with what was printed if none comes in time."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else b""
        if not line:
            self.end()
            how = f"ended with {process.returncode}" if ready else f"took {seconds:g} s"
            said = self._stderr.read_text("utf-8", "replace")[-2000:]
            raise AssertionError(f"{told}: the process {how}; it said: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        variables = VARIABLES | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._stderr.open("wb") as said:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=os.environ | variables,
            )

    def end(self) -> None:
        """Kill the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

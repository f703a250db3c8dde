"""Runs forged bundles in a process of their own: many in one, and a new one after a crash."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import stem_edge
from stem_edge.formats import EngineName

WORKER = Path(__file__).with_name("forged_worker.py")
PACKAGES = str(Path(stem_edge.__file__).parent.parent)
CASE_SECONDS = 60.0  # by the clock, on a machine that others keep busy
CPU_SECONDS = 5.0  # of this process: a refusal comes within ten seconds, also on a slower one
# What Python, numpy and onnxruntime may take in passing beside what the plan says.
SPARE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """How to load a bundle."""

    path: str
    engine: EngineName
    slots: int | None = 16
    prefill: bool | None = None
    trial: bool = False
    texts: bool = False  # use the tokenizer and the chat template, too


class Forged:
    """Cases in a worker, with a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, None
        self.found = Counter[str]()  # what came of the cases
        (folder / "cache").mkdir()

    _process: subprocess.Popen[bytes] | None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def check(self, case: Case) -> str:
        """Run a case; fails unless it is refused or runs. Returns with what it was refused."""
        told = self._ask(case)
        assert not told["broken"], f"{case}: {told['broken']}"
        assert told["seconds"] < CPU_SECONDS, f"{case}: took {told['seconds']:.1f} s"
        assert told["taken"] < SPARE_NBYTES, f"{case}: {told['taken']:,} bytes beyond the plan"
        refused: str = told["refused"]
        self.found[refused.partition(":")[0] or "ran"] += 1
        assert len(refused.splitlines()) <= 1, refused
        return refused

    def bundle(self) -> Path:
        """Where the next bundle is to be made; the last one goes."""
        shutil.rmtree(self._folder / "bundle", ignore_errors=True)
        return self._folder / "bundle"

    def _ask(self, case: Case) -> Mapping[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asdict(case)).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], CASE_SECONDS)
        line = process.stdout.readline() if ready else b""
        if not line:
            self._end()
            how = f"ended with {process.returncode}" if ready else f"took {CASE_SECONDS:g} s"
            said = (self._folder / "stderr").read_text("utf-8", "replace")[-2000:]
            raise AssertionError(f"{case}: the worker {how}; it said: {said}")
        told: dict[str, Any] = json.loads(line)
        return told

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [PACKAGES, os.environ.get("PYTHONPATH", "")]
        with (self._folder / "stderr").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, str(WORKER), str(self._folder / "cache")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

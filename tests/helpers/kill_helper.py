"""Run exports in forked children and kill them, as test_kills.py asks.

This process has imported everything and has no threads, so that forked children start at once. It
reads a line of JSON for each job, and answers whether the child was killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_disk import CHANGES, Counter, watch
from tiny_exports import Kind, TinyExport

from stem_edge.export.quantization import calibration
from stem_edge.files import disk


@dataclass(frozen=True)
class Job:
    """An export to kill before its `at`-th change of the disk."""

    kind: Kind
    checkpoint: str
    out: str
    at: int | None = None
    text: str = ""  # that guides quantizing; empty: the one that is shipped
    imports: bool = False  # set for the first job: import here whatever it imports


def main() -> None:
    """Run jobs until the input ends."""
    warnings.simplefilter("ignore")
    disk._sync = lambda descriptor: None  # skipped because it is slow and a kill loses nothing
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if job.imports:
            _import_what_it_does(job)
        status = _in_child(job)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        answer = {"killed": killed, "status": status}
        print(json.dumps(answer), flush=True)


def _in_child(job: Job) -> int:
    child = os.fork()
    if child == 0:
        try:
            _export(job)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _import_what_it_does(job: Job) -> None:
    """Learn the modules from a child, because an export here would leave threads behind."""
    read, write = os.pipe()
    if os.fork() == 0:
        _export(job)
        os.write(write, json.dumps(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        names = json.load(pipe)
    os.wait()
    shutil.rmtree(job.out)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _export(job: Job) -> None:
    patch, count = pytest.MonkeyPatch(), Counter()

    def before(name: str) -> None:
        if count(name) == job.at:
            os.kill(os.getpid(), signal.SIGKILL)

    if job.text:
        patch.setattr(calibration, "SHIPPED", Path(job.text))
    watch(patch, CHANGES, before)
    checkpoint = Path(job.checkpoint)
    TinyExport(job.kind, checkpoint, None, checkpoint).run(Path(job.out))


if __name__ == "__main__":
    main()

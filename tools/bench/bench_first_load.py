"""Measure the first load of a bundle: time, and anonymous memory of all processes together.

    python tools/bench/bench_first_load.py BUNDLE --memory 400MB --context-length 512
    python tools/bench/bench_first_load.py BUNDLE --memory 300MB --cgroup 330MB    (as root, cgroups of version 1)

Loads the bundle twice with a cache folder that is empty at first, and generates a few tokens. Reads
/proc each 10 ms, so it is for Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from stem_edge.units import parse_size

SECONDS = 0.01
GROUPS = Path("/sys/fs/cgroup/memory")
LOAD = """\
import json, os, pathlib, sys, time
if sys.argv[2]:
    pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
import stem_edge
options = json.loads(sys.argv[1])
started = time.perf_counter()
with stem_edge.load(options.pop("path"), **options) as model:
    loaded = time.perf_counter() - started
    text = "".join(c.text for c in model.generate("Once upon a time", max_new_tokens=8))
    print(json.dumps({"load": loaded, "text": text, "planned": model.plan.total}))"""


class Sampler(threading.Thread):
    """Samples the anonymous memory of a process and all its children."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over = psutil.Process(root), threading.Event()
        self.peak = 0
        self.peaks: dict[str, int] = {}  # of each process alone

    def run(self) -> None:
        while not self._over.wait(SECONDS):
            total = 0
            for name, nbytes in self._sizes():
                total += nbytes
                self.peaks[name] = max(nbytes, self.peaks.get(name, 0))
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _sizes(self) -> Iterator[tuple[str, int]]:
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return
        for process in found:
            try:
                nbytes = _anonymous(process.pid)
                words = " ".join(process.cmdline())
            except (OSError, psutil.Error):
                continue
            modules = [name for name in ("trial_worker", "prepack_worker") if name in words]
            yield (modules or ["load"])[0], nbytes


def _anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return sum(map(int, sizes)) << 10


@contextmanager
def group(limit: str | None) -> Iterator[Path | None]:
    """Make a cgroup with a memory limit, and remove it afterwards."""
    if limit is None:
        yield None
        return
    folder = GROUPS / f"stem-edge-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(parse_size(limit)))
        yield folder
    finally:
        folder.rmdir()


def load(options: dict[str, object], folder: Path | None) -> dict[str, Any]:
    """Load in a process of its own; return what it says, and its memory in bytes."""
    group = "" if folder is None else str(folder / "cgroup.procs")
    command = [sys.executable, "-P", "-c", LOAD, json.dumps(options), group]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    sampler = Sampler(process.pid)
    sampler.start()
    out, _ = process.communicate()
    sampler.stop()
    said = json.loads(out) if process.returncode == 0 else {"status": process.returncode}
    seconds = round(time.perf_counter() - started, 2)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_seconds": round(cpu, 1),
        "peak": sampler.peak,
        "alone": sampler.peaks,
        **said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--memory", help="as for stem-edge generate")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cgroup", metavar="SIZE", help="limit of a cgroup for all processes")
    parser.add_argument("--cache-dir", type=Path, help="(a new one, removed afterwards)")
    args = parser.parse_args()
    cache = args.cache_dir or Path(tempfile.mkdtemp())
    options: dict[str, object] = {
        "path": str(args.bundle),
        "memory": args.memory,
        "context_length": args.context_length,
        "threads": args.threads,
        "cache_dir": str(cache),
    }
    try:
        with group(args.cgroup) as folder:
            for which in ("first", "second"):
                print(json.dumps({which: load(options, folder)}), flush=True)
    finally:
        if args.cache_dir is None:
            shutil.rmtree(cache)


if __name__ == "__main__":
    main()

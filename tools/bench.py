"""Speed and memory of a bundle, alone or against others, in one run and one table.

    python tools/bench.py model ids.int32
    python tools/bench.py model ids.int32 --against llama.cpp dense=dense_model resident
    python tools/bench.py model text.txt --against flash=emmc --cold --json report.json

IDS is a text (read with the bundle's tokenizer) or token ids of real text (.int32 little-endian, or
.npy): which rows are read, and how often, decides. Every engine runs in a process of its own; they
take turns, A B A B, with the same tokens, and ratios are medians over the rounds. Comparisons:

    resident        the same bundle with all tables in memory
    dense=BUNDLE    another bundle in the same engine
    flash=NAME      the same bundle on emulated flash
    llama.cpp[=TYPE]  a dense model of the same shape: Q4_0, Q4_0-pure, Q4_K_M (default: all)
    torch           the public trainer's way of computing, in bfloat16
    unprepared, mmap, plain, block=BUNDLE   other ways of running
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_report import Measured, machine, print_report, summary
from bench_subjects import Subject, make_subjects

import stem_edge
from stem_edge.bundle import TABLES, Bundle

SHORT_PROMPT = 16  # of the time from nothing to a first token
SAMPLE_SECONDS = 0.1  # oftener, it takes time from an engine that uses every core
BANDWIDTH_NBYTES = 1 << 29  # of each thread: far more than a cache holds


class Worker:
    """A bench_worker process, its memory sampled while it works."""

    def __init__(self, subject: Subject, context: int, threads: int) -> None:
        wanted = {
            "kind": subject.kind,
            "path": subject.path,
            "options": subject.options,
            "context": context,
            "threads": threads,
        }
        command = [sys.executable, str(Path(__file__).with_name("bench_worker.py"))]
        self._process = subprocess.Popen(
            [*command, json.dumps(wanted)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peaks: dict[str, dict[str, int]] = {}
        self.loaded = self._answer("load")

    def ask(self, phase: str, do: str, ids: list[int]) -> dict[str, Any]:
        """Send a request and wait; peaks of memory are kept by phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "ids": ids}) + "\n")
        self._process.stdin.flush()
        return self._answer(phase)

    def _answer(self, phase: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        with self._sampling(phase):
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @contextlib.contextmanager
    def _sampling(self, phase: str) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_SECONDS):
                self._note(phase)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._note(phase)

    def _note(self, phase: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
            values = {line.split(":")[0]: line.split(":")[1].split() for line in lines}
            at = self.peaks.setdefault(phase, {"anonymous": 0, "file": 0})
            taken = sum(int(values[name][0]) << 10 for name in ("RssAnon", "VmSwap"))
            at["anonymous"] = max(at["anonymous"], taken)
            at["file"] = max(at["file"], int(values["RssFile"][0]) << 10)

    def close(self) -> None:
        """End it: it stops when nobody asks any more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Bench:
    """One run over all subjects."""

    def __init__(self, args: argparse.Namespace, bundle: Bundle, subjects: list[Subject]) -> None:
        self.args, self.bundle, self.subjects = args, bundle, subjects
        self.ids = read_ids(args.ids, bundle)
        needed = args.prompt + args.tokens
        if len(self.ids) < needed:
            raise SystemExit(f"{args.ids}: {len(self.ids)} ids, at least {needed} are needed")
        self.context = args.context or needed
        self.measured = {subject.name: Measured() for subject in subjects}
        self.bandwidths: list[float] = []

    def run(self) -> None:
        """Loads, then rounds."""
        for subject in self.subjects:
            self._say(f"loading {subject.name}")
            self._loads(subject)
        workers = {s.name: Worker(s, self.context, self.args.threads) for s in self.subjects}
        try:
            for turn in range(-1, self.args.rounds):  # the first one warms up and does not count
                self._say(f"round {turn + 1} of {self.args.rounds}")
                if turn >= 0:
                    self.bandwidths.append(bandwidth(self.args.threads))
                for name, worker in workers.items():
                    self._turn(self.measured[name], worker, turn)
            for name, worker in workers.items():
                self.measured[name].peaks = worker.peaks
                self.measured[name].loaded = worker.loaded
        finally:
            for worker in workers.values():
                worker.close()
        self._say("")

    def _loads(self, subject: Subject) -> None:
        """Time from nothing to a first token, in new processes: files in the page cache, or not."""
        measured, prompt = self.measured[subject.name], self.ids[:SHORT_PROMPT]
        for cold in [None, *[False] * self.args.loads, *[True] * self.args.cold]:
            if cold is not None and (subject.kind == "torch" or subject.options.get("resident")):
                return  # minutes that nobody waits for
            if cold:
                drop_pages(self._files(subject))
            worker = Worker(subject, self.context, self.args.threads)
            try:
                first = worker.ask("first", "prefill", prompt)["seconds"]
            finally:
                worker.close()
            if cold is not None:
                to = measured.cold_loads if cold else measured.loads
                to.append((worker.loaded["seconds"], worker.loaded["seconds"] + first))

    def _turn(self, measured: Measured, worker: Worker, turn: int) -> None:
        span = self.args.prompt + self.args.tokens
        start = (turn % max(1, len(self.ids) // span)) * span
        ids = self.ids[start : start + span]
        if self.args.cold:
            drop_pages([self.bundle.file(TABLES)])
        prefill = worker.ask("prefill", "prefill", ids[: self.args.prompt])
        if self.args.cold:
            drop_pages([self.bundle.file(TABLES)])
        decode = worker.ask("decode", "decode", ids[self.args.prompt :])
        if turn >= 0:
            measured.add(self.args.prompt, prefill, decode)

    def _files(self, subject: Subject) -> list[Path]:
        from stem_edge.runtime.prepared import find

        if subject.kind != "stem-edge":
            return [Path(subject.path)]
        found = find(stem_edge.open_bundle(subject.path), None)
        return [Path(subject.path), *([found[0]] if found else [])]

    def _say(self, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def read_ids(path: Path, bundle: Bundle) -> list[int]:
    """Token ids of a text or of a file of ids."""
    if path.suffix == ".npy":
        ids = np.load(path, allow_pickle=False)
    elif path.suffix == ".int32":
        ids = np.fromfile(path, "<i4")
    else:
        from stem_edge.runtime.text import TextCodec

        text = path.read_text("utf-8")
        ids = np.array(TextCodec(bundle.file("tokenizer.json")).encode(text))
    if not len(ids) or ids.min() < 0 or ids.max() >= bundle.manifest.model.vocab_size:
        raise SystemExit(f"{path}: not token ids of this bundle's vocabulary")
    found: list[int] = ids.tolist()
    return found


def drop_pages(paths: list[Path]) -> None:
    """Take files out of the page cache (Linux)."""
    for path in [file for p in paths for file in ([p] if p.is_file() else p.rglob("*"))]:
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bandwidth(threads: int) -> float:
    """Bytes a second that all threads together read from memory."""
    arrays = [np.ones(BANDWIDTH_NBYTES // 8, np.uint64) for _ in range(threads)]
    rates = []
    for _ in range(3):
        readers = [threading.Thread(target=np.bitwise_or.reduce, args=(a,)) for a in arrays]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        rates.append(threads * BANDWIDTH_NBYTES / (time.perf_counter() - started))
    return max(rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument("ids", type=Path, metavar="IDS")
    parser.add_argument("--against", nargs="+", default=[], metavar="WHAT", help="see above")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (512)")
    parser.add_argument("--tokens", type=int, default=128, help="decode steps of a round (128)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--loads", type=int, default=3, help="timed loads of each (3)")
    parser.add_argument("--context", type=int, help="tokens (as many as are used)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, help="of the row cache (1 %% of the vocabulary)")
    parser.add_argument("--memory", help="limit instead, like 600MB")
    parser.add_argument("--emulate-flash", metavar="NAME", help="for all stem-edge subjects")
    parser.add_argument(
        "--cold", action="store_true", help="tables and files not in the page cache"
    )
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="for GGUF files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    args = parser.parse_args()
    bundle = stem_edge.open_bundle(args.bundle)
    bench = Bench(args, bundle, make_subjects(args, bundle))
    bench.run()
    report = {
        "machine": machine(),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "bandwidth": median(bench.bandwidths),
        "subjects": {name: summary(each) for name, each in bench.measured.items()},
    }
    print_report(report, bundle, bench.measured, bench.bandwidths, args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

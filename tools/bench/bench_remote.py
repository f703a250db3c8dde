"""Time decoding with the tables behind an emulated network, with and without a disk tier.

    python tools/bench/bench_remote.py model --text book.txt --latency 0.02 --bandwidth 100e6

A server in a process of its own on this machine serves the bundle's shards, as late and as slowly as
asked. All subjects follow the same text, in turns of a few tokens, so that whatever else the machine
does slows all of them. Each begins with an empty row cache and the same prompt:

    local      the tables are in the bundle's folder
    no tier    over the network, nothing kept on disk
    cold       over the network, with a disk tier that is empty at first
    warm       the same, after the text before the prompt has gone through it (--before)

A busy machine has slower steps, beside which waiting weighs less. "quiet" is what the ratio to local
would be if all steps computed as fast as the fastest tenth of local's: that time, over the same and
what the subject stalled longer than local.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from range_server import serving

import stem_edge
from stem_edge.bundle.manifest import TABLES
from stem_edge.measuring.workload import read_ids
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.records import RowCounters
from stem_edge.system.user_folder import cache_folder
from stem_edge.text_table import table

TURN = 20  # tokens that a subject decodes before the next one does
CHUNK = 64  # tokens whose rows are fetched at once in the text before the prompt


class Subject:
    """A model that decodes the text, and what that took."""

    def __init__(self, name: str, model: Model, prompt: list[int], context: int) -> None:
        self.name, self.model, self.times = name, model, list[float]()
        self._context = model.engine.open_context(context)
        started = time.perf_counter()
        for _ in model.engine.process(self._context, prompt, top=1):
            pass
        self.prompt_seconds = time.perf_counter() - started
        self._begin = model.engine.rows.counters()

    def follow(self, token_ids: list[int]) -> None:
        """Decode some tokens of the text."""
        for token in token_ids:
            started = time.perf_counter()
            self.model.engine.step(self._context, np.array([token]), top=1)
            self.times.append(time.perf_counter() - started)

    @property
    def quiet(self) -> float:
        """Seconds of a step that nothing disturbs: of the fastest tenth."""
        return float(np.quantile(self.times, 0.1))

    def grown(self) -> RowCounters:
        """Return what was counted since the prompt."""
        return self.model.engine.rows.counters() - self._begin

    def row(self, local: Subject) -> tuple[str, ...]:
        """Figures of the decoded tokens, as they are printed."""
        counted, tokens = self.grown(), len(self.times)
        missing = max(1, counted.tier_hits + counted.tier_misses)
        more = (counted.stall_seconds - local.grown().stall_seconds) / tokens
        return (
            *(self.name, f"{self.prompt_seconds:.2f}", f"{tokens / sum(self.times):.2f}"),
            *(
                f"{sum(local.times) / sum(self.times):.3f}",
                f"{local.quiet / (local.quiet + more):.3f}",
            ),
            *(f"{counted.hits / tokens:.1%}", f"{counted.tier_hits / missing:.1%}"),
            f"{counted.network_bytes / tokens / 1e3:.1f}",
            f"{counted.stall_seconds / tokens * 1e3:.2f}",
        )


HEAD = (
    *("", "prompt s", "tokens/s", "/ local", "quiet", "row hits", "tier hits"),
    *("network kB", "stall ms"),
)


def _values(counters: RowCounters) -> list[Any]:
    return list(vars(counters).values())


def main() -> None:
    args = _arguments()
    ids = [int(token) for token in read_ids(args.text, stem_edge.open_bundle(args.bundle))]
    start, context = args.before, args.prompt + args.tokens
    prompt, following = ids[start : start + args.prompt], ids[start + args.prompt : start + context]
    if len(following) < args.tokens:
        raise SystemExit(
            f"{args.text} has {len(ids)} tokens; give a longer text or a smaller --before"
        )
    common: dict[str, Any] = {"slots": args.slots, "context_length": context, "warm_start": False}
    common |= {"trial": False, "engine": args.engine, "speculate": False, "keep_prefixes": False}
    with ExitStack() as stack:
        url = stack.enter_context(_served(args.bundle / TABLES, args.latency, args.bandwidth))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.work)))
        far = {
            name: common | _cache(folder / name) | {"tables": url}
            for name in ("none", "cold", "warm")
        }
        for name in ("cold", "warm"):
            far[name]["disk_tier"] = args.tier
        far["none"]["disk_tier"] = 0
        _pass_before(args.bundle, far["warm"], ids[:start])
        names = {"local": common, "no tier": far["none"], "cold": far["cold"], "warm": far["warm"]}
        subjects = list[Subject]()
        for name, options in names.items():
            model = stack.enter_context(stem_edge.load(args.bundle, **options))
            subjects.append(Subject(name, model, prompt, context))
        for at in range(0, len(following), TURN):
            for subject in subjects:
                subject.follow(following[at : at + TURN])
        print(f"fastest tenth of local's steps: {subjects[0].quiet * 1e3:.1f} ms")
        print("\n".join(table([HEAD, *(subject.row(subjects[0]) for subject in subjects)])))


def _pass_before(bundle: Path, options: dict[str, Any], token_ids: list[int]) -> None:
    """Bring the rows of the text before the prompt into a disk tier, without computing."""
    started = time.perf_counter()
    with stem_edge.load(bundle, **options) as model:
        rows = model.engine.rows
        for at in range(0, len(token_ids), CHUNK):
            rows.fetch(np.array(token_ids[at : at + CHUNK]))
        seconds, counted = time.perf_counter() - started, rows.counters()
    print(
        f"{len(token_ids)} tokens before the prompt: {counted.network_bytes / 1e6:.0f} MB in "
        f"{counted.network_reads} requests, {seconds:.0f} s with loading"
    )


def _cache(folder: Path) -> dict[str, Any]:
    """Make a cache folder of its own, but with the backbones that are prepared already."""
    folder.mkdir()
    if (prepared := cache_folder(None) / "prepared").is_dir():
        (folder / "prepared").symlink_to(prepared)
    return {"cache_dir": folder}


@contextmanager
def _served(root: Path, latency: float, bandwidth: float) -> Iterator[str]:
    """Serve a folder from another process until the block ends; gives its URL."""
    spawn = multiprocessing.get_context("spawn")
    url, end = spawn.Queue(), spawn.Event()
    server = spawn.Process(target=_serve, args=(root, latency, bandwidth, url, end), daemon=True)
    server.start()
    try:
        yield url.get()
    finally:
        end.set()
        server.join()


def _serve(root: Path, latency: float, bandwidth: float, url: Any, end: Any) -> None:
    with serving(root, latency, bandwidth) as server:
        url.put(server.url)
        end.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE")
    add("--text", type=Path, required=True, help="text, or token ids (.npy, .int32)")
    add("--latency", type=float, default=0.02, help="seconds of a request to its first byte")
    add("--bandwidth", type=float, default=100e6, help="bytes a second of all requests together")
    add("--tier", default="1GB", help="size of the disk tier")
    add("--slots", type=int, default=2048, help="of the row cache")
    add("--before", type=int, default=20_000, help="tokens of the text before the prompt")
    add("--prompt", type=int, default=256)
    add("--tokens", type=int, default=600, help="to decode")
    add("--engine", default="auto")
    add("--work", help="folder for the tiers (default: the system's for temporary files)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

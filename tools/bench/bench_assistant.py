"""Time decoding with a bundle's assistant, whose drafts are made as often right as those of a trained pair.

    python tools/bench/bench_assistant.py BUNDLE IDS RIGHT --answers 4 --tokens 64
    python tools/bench/bench_assistant.py BUNDLE IDS RIGHT --cold

Weights of a bundle for benchmarks may be noise, so its assistant would never be right. Here it drafts, and takes
its time, but after each token as many of its drafts are replaced by the next tokens of the text as RIGHT has
(right.json of tools/experiments/assistant_pair.py), and the others by wrong ones. Answers follow a real text: IDS,
a file of little-endian int32 token ids, taken modulo the vocabulary. Each is decoded without guesses, with these
drafts, and with drafts that are all wrong; ratios are medians over the answers, with the least and greatest.

With --cold, no row is in a slot when an answer begins, and no page of the tables in the page cache (Linux).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

import stem_edge
from stem_edge.bundle.manifest import TABLES
from stem_edge.measuring.bench.stem import Following
from stem_edge.runtime import Model
from stem_edge.runtime.backends.interface import MOST, StepCosts
from stem_edge.runtime.engine import Context
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.store import RowStore
from stem_edge.runtime.speculation.assistant_drafts import Assistant
from stem_edge.runtime.speculation.drafts import ByPlace, Drafts, Source
from stem_edge.runtime.speculation.speculation import GatedGuesses, Speculation
from stem_edge.runtime.steps import Guesses
from stem_edge.system.page_cache import drop_pages, files_in
from stem_edge.text_table import table

PLAIN, TRAINED, WRONG = "without guesses", "drafts of the pair", "all wrong"


class Told(ByPlace):
    """Drafts of an assistant, of which so many are right after each token of an answer."""

    def __init__(self, drafts: Drafts, text: Sequence[int], right: Sequence[int]) -> None:
        super().__init__()
        self._drafts, self._text, self._right = drafts, text, right
        self.seconds = drafts.seconds

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Let the assistant draft; return other guesses."""
        self._drafts.draft(seen, count)
        known = np.array(self._text[len(seen) : len(seen) + count])
        right = self._right[len(seen) - (len(self._text) - len(self._right)) - 1]
        made: list[int] = (known ^ (np.arange(len(known)) >= right)).tolist()
        return made


class Alone(Speculation):
    """Speculation with such drafts, and none of the text's."""

    def __init__(
        self, costs: StepCosts, source: Source, text: Sequence[int], right: Sequence[int]
    ) -> None:
        super().__init__(costs, MOST - 1)
        self._source = source
        self._text, self._right = text, right

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int, context: Context) -> Iterator[Guesses]:
        """Lend the guesses for an answer."""
        with self._source.begin(prompt, length + self.most, context) as drafts:
            told = Told(drafts, self._text, self._right)
            yield GatedGuesses(self._gate, [told], self.costs.seconds)


class Run(NamedTuple):
    """Figures of a token."""

    seconds: float
    stalled: float
    rows: float  # that were read
    drafted: float
    accepted: float


def decode(model: Model, text: list[int], new: int, *, cold: bool) -> Run:
    """Decode the last tokens of a text."""
    if cold:
        rows = model.engine.rows
        if not isinstance(rows, Prefetcher) or not isinstance(rows.store, RowStore):
            raise TypeError("the tables are not on flash")
        rows.cache.forget(np.arange(rows.store.layout.records))
        drop_pages(files_in(model.bundle.path / TABLES))
    chunks = model.generate(text[:-new], Following(max_new_tokens=new, text=tuple(text)))
    next(chunks)
    before = model.engine.rows.counters()
    list(chunks)
    stats, spent = model.stats, model.engine.rows.counters() - before
    parts = spent.stall_seconds, spent.misses, stats.drafted_tokens, stats.accepted_tokens
    return Run(*(part / (new - 1) for part in (stats.decode_seconds, *parts)))


def measure(args: argparse.Namespace, model: Model) -> dict[str, list[Run]]:
    """Decode all answers in all ways, one after the other."""
    loaded, runs = model.stepping.speculation, dict[str, list[Run]]()
    source = None if loaded is None else next(iter(loaded.sources), None)
    if loaded is None or not isinstance(source, Assistant):
        raise SystemExit(f"{args.bundle}: has no assistant")
    print(f"{loaded.costs}\na draft takes {source.seconds / loaded.costs.seconds:.3f} of a step")
    ids = np.fromfile(args.ids, "<i4").astype(np.int64) % model.config.vocab_size
    size, count = args.prompt_tokens + args.tokens, args.tokens
    recorded = np.concatenate(json.loads(args.right.read_text()))
    right = np.resize(recorded, (args.answers + 1, count))
    right[0] = MOST  # of a first answer, which opens the graphs and is not counted
    for turn, told in enumerate(right.tolist()):
        text = ids[turn * size : (turn + 1) * size].tolist()
        ways = {PLAIN: None, TRAINED: told, WRONG: [0] * count}
        for way, given in ways.items():
            own = None if given is None else Alone(loaded.costs, source, text, given)
            model.speculate(own)
            if not args.cold and way == PLAIN:
                decode(model, text, count, cold=False)  # brings the rows
            runs.setdefault(way, []).append(decode(model, text, count, cold=args.cold))
    model.speculate(loaded)
    return {way: found[1:] for way, found in runs.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name in ("bundle", "ids", "right"):
        add(name, type=Path, metavar=name.upper())
    add("--answers", type=int, default=4, help="(4)")
    add("--tokens", type=int, default=64, help="of an answer (64)")
    add("--prompt-tokens", type=int, default=64, help="(64)")
    add("--slots", type=int, default=1024, help="(1024)")
    add("--threads", type=int, help="(all cores)")
    add("--cache-dir", type=Path, help="(the user's)")
    add("--cold", action="store_true")
    args = parser.parse_args()
    options = {"slots": args.slots, "threads": args.threads, "cache_dir": args.cache_dir}
    length = args.prompt_tokens + args.tokens + MOST
    with stem_edge.load(
        args.bundle, context_length=length, keep_prefixes=False, speculate=True, **options
    ) as model:
        runs = measure(args, model)
    lines = [("", "ms/token", "/ without", "waited, ms", "rows read", "drafted", "right")]
    for way, found in runs.items():
        ratios = [base.seconds / one.seconds for one, base in zip(found, runs[PLAIN], strict=True)]
        each = Run(*(median(values) for values in zip(*found, strict=True)))
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        counts = f"{each.rows:.2f}", f"{each.drafted:.2f}", f"{each.accepted:.2f}"
        lines.append(
            (way, f"{each.seconds * 1e3:.1f}", ratio, f"{each.stalled * 1e3:.2f}", *counts)
        )
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()

"""Print the hit rate of caches on a stream of token ids, by number of slots.

    python tools/experiments/simulate_cache.py IDS.int32 [--slots 512 1024 2048]
    python tools/experiments/simulate_cache.py IDS.int32 --warm OTHER.int32 --window 2000
    python tools/experiments/simulate_cache.py TEXT --tokenizer tokenizer.json --ngrams 1 2 3

IDS is a file of little-endian int32 token ids of real text; with --tokenizer, a UTF-8 text. A slot holds
one record, that of the last 1, 2 or 3 ids (--ngrams); the caches see one a step, as in decoding:

- aged LFU: the runtime's own row cache
- LRU: evicts what was not used for longest
- pages: LRU of pages of --rows-per-page records, of which a text uses one, in the memory of the slots.
  So does a system's page cache, nearly, with rows of n-grams, whose hashes scatter them over pages
- best: what no cache exceeds, because it knows what follows (Belady, 1966)

With --window, IDS is cut into conversations of so many ids. Each has its own cache: empty, or with an
aged LFU filled by the token counts of another text, as a warm start does.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.packing import make_layout
from stem_edge.tables.token_counts import Counts, Uses, count_tokens

SLOTS = (512, 1024, 1282, 2048, 4096, 6413, 12_826)  # 1282 is one percent of Llama 3's ids

NAMES = {1: "token ids", 2: "bigrams", 3: "trigrams"}
CACHES = ("aged LFU", "LRU", "pages", "best")


def numbered(ids: I64, order: int) -> I64:
    """Number the n-grams that end at each id, from the first whole one on."""
    grams = np.lib.stride_tricks.sliding_window_view(ids, order)
    return np.unique(grams, axis=0, return_inverse=True)[1].reshape(-1)


def best(ids: I64, slots: int) -> float:
    """Hit rate of a cache that evicts what is needed last, or never again."""
    count = len(ids)
    following = np.full(count, count, np.int64)  # place where each id comes next
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    held, queue, hits = dict[int, int](), list[tuple[int, int]](), 0
    for token, then in zip(ids.tolist(), following.tolist(), strict=True):
        hits += token in held
        held[token] = then
        heappush(queue, (-then, token))
        while len(held) > slots:
            last, candidate = heappop(queue)
            if held.get(candidate) == -last:
                del held[candidate]
    return hits / count


def least_recent(ids: I64, slots: int) -> float:
    """Hit rate of a cache that evicts what was not used for longest."""
    held, hits = OrderedDict[int, None](), 0
    for token in ids.tolist():
        hits += token in held
        held[token] = None
        held.move_to_end(token)
        if len(held) > slots:
            held.popitem(last=False)
    return hits / len(ids)


def read_ids(path: Path, tokenizer: Path | None) -> I64:
    """Read ids from their file, or those of a text."""
    if tokenizer is None:
        return np.fromfile(path, "<i4").astype(np.int64)
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(tokenizer)).encode(
        path.read_text(encoding="utf-8"), add_special_tokens=False
    )
    return np.array(encoded.ids, np.int64)


def aged(ids: I64, records: int, slots: int, counts: Counts | None) -> float:
    """Hit rate of the runtime's row cache, filled by counts first, as a warm start does."""
    # The smallest possible rows, because only which of them are kept matters.
    layout, slots = make_layout(records, (0,), ((16,),), "int8", 16), min(slots, records)
    cache, read = (
        RowCache(ArraySlots(layout, slots)),
        np.zeros((slots, layout.record_nbytes), np.uint8),
    )
    if counts is not None:
        best = cache.expect(Uses(used := np.flatnonzero(counts), counts[used]))
        found = cache.find(best)
        cache.install(found.missing, read[: len(best)], found.slots)
    for step in ids.reshape(-1, 1):
        found = cache.find(step)
        cache.use(step, found)
        if len(found.missing.numbers):
            cache.install(found.missing, read[:1], found.slots)
    return cache.hits / len(ids)


def print_rates(args: argparse.Namespace, order: int) -> None:
    """Print the hit rates of records of so many ids."""
    ids = read_ids(args.ids, args.tokenizer)[: args.first]
    warm = read_ids(args.warm, args.tokenizer) if args.warm else np.zeros(0, np.int64)
    if order > 1:
        both = numbered(np.concatenate([ids, warm]), order)
        ids, warm = both[: len(ids)], both[len(ids) :]
    vocab_size = int(max(ids.max(), warm.max(initial=0))) + 1
    cut, counts = [ids], None
    title = f"{len(ids):,} ids of {args.ids.name}, {len(np.unique(ids)):,} distinct {NAMES[order]}"
    if args.window:
        counts = count_tokens(warm, vocab_size) if args.warm else None
        starts = range(0, len(ids) - args.window + 1, args.window)
        cut = [ids[at : at + args.window] for at in starts]
        title = f"{len(cut)} conversations of {args.window} ids, mean; {NAMES[order]}"
    pages = args.rows_per_page if order > 1 else 1  # a token's record fills pages of its own
    print(f"{title}\n{'slots':>8}" + "".join(f"{name:>10}" for name in CACHES))
    for slots in args.slots:
        each = [
            (
                aged(window, vocab_size, slots, counts),
                least_recent(window, slots),
                least_recent(window, max(1, slots // pages)),
                best(window, slots),
            )
            for window in cut
        ]
        means = np.mean(each, axis=0).tolist()
        print(f"{slots:>8}" + "".join(f"{rate:>10.3f}" for rate in means), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("ids", type=Path, metavar="IDS", help="file of int32 token ids, or a text")
    add("--tokenizer", type=Path, metavar="JSON", help="tokenizer.json that makes ids of texts")
    add("--first", type=int, metavar="N", help="only so many ids of the beginning")
    add("--slots", type=int, nargs="+", default=SLOTS)
    add("--window", type=int, help="cut IDS into conversations of so many ids")
    add("--warm", type=Path, metavar="IDS", help="text whose counts fill the cache")
    add("--ngrams", type=int, nargs="+", default=[1], choices=NAMES, help="of so many ids (1)")
    add("--rows-per-page", type=int, default=12, help="of n-grams (12, of 320 bytes)")
    args = parser.parse_args()
    for order in args.ngrams:
        print_rates(args, order)


if __name__ == "__main__":
    main()

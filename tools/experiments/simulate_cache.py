"""Print the hit rate of the row cache on a stream of token ids, by number of slots.

    python tools/experiments/simulate_cache.py IDS.int32 [--slots 512 1024 2048]
    python tools/experiments/simulate_cache.py IDS.int32 --warm OTHER.int32 --window 2000
    python tools/experiments/simulate_cache.py IDS.int32 --ngrams 2 --slots 2048 16384 131072

IDS is a file of little-endian int32 token ids of real text. Simulates the runtime's own cache, one id
per step as in decoding. With --window, IDS is cut into conversations of so many ids. Each has its own
cache: empty, or filled by the token counts of another text, as a warm start does. With --ngrams, records
are those of the last so many ids. Beside it, the best that a cache of this size could do, knowing what
follows (Belady, 1966).
"""

from __future__ import annotations

import argparse
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from stem_edge.measuring.planning.hit_rates import simulate
from stem_edge.numerics.quantize import I64
from stem_edge.tables.token_counts import count_tokens

SLOTS = (512, 1024, 1282, 2048, 4096, 6413, 12_826)  # 1282 is one percent of Llama 3's ids


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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", type=Path, metavar="IDS", help="file of int32 token ids")
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS)
    parser.add_argument("--window", type=int, help="cut IDS into conversations of so many ids")
    parser.add_argument("--warm", type=Path, metavar="IDS", help="text whose counts fill the cache")
    parser.add_argument("--ngrams", type=int, default=1, metavar="N", help="of so many ids (1)")
    args = parser.parse_args()
    ids = np.fromfile(args.ids, "<i4").astype(np.int64)
    warm = np.fromfile(args.warm, "<i4").astype(np.int64) if args.warm else np.zeros(0, np.int64)
    if args.ngrams > 1:
        both = numbered(np.concatenate([ids, warm]), args.ngrams)
        ids, warm = both[: len(ids)], both[len(ids) :]
    vocab_size = int(max(ids.max(), warm.max(initial=0))) + 1
    cut, counts = [ids], None
    title = f"{len(ids):,} ids of {args.ids.name}"
    if args.window:
        counts = count_tokens(warm, vocab_size) if args.warm else None
        starts = range(0, len(ids) - args.window + 1, args.window)
        cut = [ids[at : at + args.window] for at in starts]
        title = f"{len(cut)} conversations of {args.window} ids, mean"
    print(f"{title}\n{'slots':>8}{'aged LFU':>10}{'best':>8}")
    for slots in args.slots:
        rates = [simulate(window, vocab_size, slots, counts)[0] for window in cut]
        most = [best(window, slots) for window in cut]
        print(f"{slots:>8}{np.mean(rates):>10.3f}{np.mean(most):>8.3f}")


if __name__ == "__main__":
    main()

"""Hit rate of the row cache on a stream of token ids, by number of slots.

    python tools/simulate_cache.py IDS.int32 [--slots 512 1024 2048]

IDS is a file of little-endian int32 token ids of real text. Runs the runtime's own cache, one id a
step as in decoding, with rows of the smallest possible size. LRU is simulated beside it.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np

from stem_edge.rows import make_layout
from stem_edge.runtime.cache import I64, RowCache


def aged_lfu(ids: I64, vocab_size: int, slots: int) -> float:
    """Hit rate of stem_edge.runtime.cache."""
    layout = make_layout(vocab_size, (0,), 16, "int8", 16)
    cache, record = RowCache(layout, slots), np.zeros((1, layout.record_nbytes), np.uint8)
    for place in range(len(ids)):
        token = ids[place : place + 1]
        cache.use(token)
        if len(cache.missing(token)):
            cache.install(token, record, token)
    return cache.hits / (cache.hits + cache.misses)


def lru(ids: I64, slots: int) -> float:
    """Hit rate of least recently used."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token in ids.tolist():
        if token in resident:
            hits += 1
            resident.move_to_end(token)
        else:
            if len(resident) == slots:
                resident.popitem(last=False)
            resident[token] = None
    return hits / len(ids)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", type=Path, metavar="IDS", help="file of int32 token ids")
    parser.add_argument("--slots", type=int, nargs="+", default=[512, 1024, 2048])
    args = parser.parse_args()
    ids = np.fromfile(args.ids, "<i4").astype(np.int64)
    vocab_size = int(ids.max()) + 1
    print(f"{len(ids):,} ids of {args.ids.name}\n{'slots':>8}{'aged LFU':>10}{'LRU':>8}")
    for slots in args.slots:
        print(f"{slots:>8}{aged_lfu(ids, vocab_size, slots):>10.3f}{lru(ids, slots):>8.3f}")


if __name__ == "__main__":
    main()

"""Print, and plot, the hit rate of caches on a stream of token ids, by number of slots.

    python tools/experiments/simulate_cache.py IDS.int32 [--slots 512 1024 2048]
    python tools/experiments/simulate_cache.py IDS.int32 --warm OTHER.int32 --window 2000
    python tools/experiments/simulate_cache.py TEXT --tokenizer tokenizer.json --ngrams 1 2 3 --plot hits.png

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

from stem_edge.drawing import LETTERS, check_plot, draw, new_figure, plain, save
from stem_edge.measuring.planning.hit_rates import simulate
from stem_edge.numerics.quantize import I64
from stem_edge.tables.token_counts import count_tokens

SLOTS = (512, 1024, 1282, 2048, 4096, 6413, 12_826)  # 1282 is one percent of Llama 3's ids

NAMES = {1: "token ids", 2: "bigrams", 3: "trigrams"}
# Of Okabe and Ito, which can also be told apart in grey, and by the colour-blind.
COLOURS = {"aged LFU": "#009E73", "LRU": "#56B4E9", "pages": "#D55E00", "best": "#000000"}
Rates = dict[str, list[float]]  # by cache, one for each number of slots


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


def rates(args: argparse.Namespace, order: int) -> Rates:
    """Print the hit rates of records of so many ids, and return them."""
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
    found = dict[str, list[float]]()
    print(f"{title}\n{'slots':>8}" + "".join(f"{name:>10}" for name in COLOURS))
    for slots in args.slots:
        each = [
            (
                simulate(window, vocab_size, slots, counts)[0],
                least_recent(window, slots),
                least_recent(window, max(1, slots // pages)),
                best(window, slots),
            )
            for window in cut
        ]
        means = np.mean(each, axis=0).tolist()
        for name, rate in zip(COLOURS, means, strict=True):
            found.setdefault(name, []).append(rate)
        print(f"{slots:>8}" + "".join(f"{rate:>10.3f}" for rate in means), flush=True)
    return found


def plot(slots: list[int], curves: dict[int, Rates], path: Path) -> None:
    """Draw a panel for each kind of record, and a line in it for each cache."""
    figure = new_figure(2.6)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (order, found) in zip(panels, curves.items(), strict=True):
        for name, shares in found.items():
            style = "--" if name == "best" else "-"
            percent = [100 * share for share in shares]
            axes.semilogx(
                slots, percent, style, color=COLOURS[name], marker="o", markersize=3, label=name
            )
        axes.set_title(NAMES[order], loc="left", fontsize=LETTERS)
        axes.set(xlabel="slots", ylim=(0, 102))
        plain(axes)
    panels[0].set_ylabel("hit rate, %", fontsize=LETTERS)
    panels[-1].legend(fontsize=LETTERS, frameon=False)
    save(figure, path)


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
    add("--plot", type=Path, metavar="FILE", help="draw into this .png, .pdf or .svg, too")
    args = parser.parse_args()
    if args.plot:
        check_plot(args.plot)
    curves = {order: rates(args, order) for order in args.ngrams}
    if args.plot:
        draw(args.plot, lambda path: plot(args.slots, curves, path))


if __name__ == "__main__":
    main()

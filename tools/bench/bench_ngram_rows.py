"""Time the rows of n-grams that a server of a large backbone needs, with the table cold and in memory.

    python tools/bench/bench_ngram_rows.py /tmp/rows ids.int32 --size 20GB --decode 35 --prompt 800

The table is that of Qwen3.8-Flash-Next, 16 rows of 160 bfloat16 values a token, with fewer rows and
made-up values; it is written to the folder if nothing is there. IDS is a file of little-endian int32 ids
of real text. A pretended backbone takes the time of a token at these rates (tokens/s) and needs the rows
before its second layer. Each round runs another piece of the text: first with the table cold (no page
of it in the page cache; Linux), then again with what it needs in memory. Ratios of speeds are medians;
bytes are those of the cold runs, as they are asked for and as the disk gives them.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from range_server import serving

import stem_edge
from stem_edge.files.trees import make_folders
from stem_edge.ngrams.rows import NgramTable
from stem_edge.ngrams.schemes import keyed_tables
from stem_edge.ngrams.store import NgramFormat, group_metadata
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.ngram_rows import NgramRows
from stem_edge.system.page_cache import drop_pages, files_in
from stem_edge.tables.shards import ShardGrid, array_metadata
from stem_edge.tables.zarr_json import encode_metadata
from stem_edge.text_table import table
from stem_edge.units import parse_size

QWEN = {
    "vocab_size": 248_320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ngram_size": 3,
    "heads_per_ngram": 8, "eos_token_id": 248_044,
}  # fmt: skip
LAYERS = 48  # of the backbone; the first one computes before rows are needed
SHARD_PAGES, PIECE_PAGES = 1 << 17, 1 << 11
CHUNK = 512  # tokens of a prompt that are computed together


def make(root: Path, nbytes: int) -> None:
    """Write a table of about so many bytes, the same made-up pages again and again."""
    base = nbytes // (16 * 345)
    (keyed,) = keyed_tables(QWEN | {"ngram_vocab_size_base": base})
    shape = NgramTable(name="layer.1", layer=1, hash=keyed.hash, width=keyed.width, stored="bf16")
    grid = ShardGrid(root / shape.name, shape.format.stored, min(shape.pages, SHARD_PAGES))
    random = np.random.default_rng(0)
    piece = grid.append_checksums(
        random.integers(0, 63, (PIECE_PAGES, shape.page_nbytes), np.uint8)
    )
    for shard in range(grid.shards):
        path, left = grid.shard_path(shard), grid.shard_records(shard)
        make_folders(path.parent)
        with path.open("wb") as file:
            while left > 0:
                file.write(piece[: min(left, PIECE_PAGES) * grid.stride])
                left -= PIECE_PAGES
            file.write(grid.index_bytes(shard))
    (grid.root / "zarr.json").write_bytes(encode_metadata(array_metadata(grid)))
    (root / "zarr.json").write_bytes(encode_metadata(group_metadata(NgramFormat(tables=(shape,)))))


def read_so_far(rows: NgramRows) -> tuple[float, float, float]:
    """Return KiB of pages, KiB that the disk gave this process (Linux), and requests to a server."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    count = rows.counters()
    nbytes = count.bytes_read + count.network_bytes
    return nbytes / 1024, int(fields["read_bytes"]) / 1024, count.network_reads


def decode(rows: NgramRows, text: I64, start: int, rate: float) -> float:
    """Return the seconds of a step at each id from `start` on; its rows are asked for as it begins."""
    began = time.perf_counter()
    for at in range(start, len(text)):
        rows.prefetch(text[at : at + 1], text[:at])
        time.sleep(1 / rate / LAYERS)
        rows.rows(text[at : at + 1], text[:at])
        time.sleep((1 - 1 / LAYERS) / rate)
    return time.perf_counter() - began


def prompt(rows: NgramRows, text: I64, start: int, rate: float) -> float:
    """Return the seconds of a prompt in chunks; rows of the next are asked for as one computes."""
    began = time.perf_counter()
    rows.prefetch(text[start : start + CHUNK], text[:start])
    for at in range(start, len(text), CHUNK):
        rows.rows(text[at : at + CHUNK], text[:at])
        rows.prefetch(text[at + CHUNK : at + 2 * CHUNK], text[: at + CHUNK])
        time.sleep(len(text[at : at + CHUNK]) / rate)
    return time.perf_counter() - began


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("ids", type=Path, metavar="IDS")
    add("--size", default="20GB")
    add("--decode", type=float, default=35, metavar="TOKENS/S", help="(35)")
    add("--prompt", type=float, default=800, metavar="TOKENS/S", help="(800)")
    add(
        "--tokens",
        type=int,
        nargs=2,
        default=[128, 2048],
        help="of a decode and a prompt (128 2048)",
    )
    add("--latency", type=float, metavar="MS", help="read from a server here that answers so late")
    add("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()
    if not args.folder.exists():
        make(args.folder, parse_size(args.size))
    ids, files = np.fromfile(args.ids, "<i4").astype(np.int64), files_in(args.folder)
    head = ("", "tokens", "tok/s", "cold, s", "in memory, s", "speed, cold / in memory")
    lines: list[tuple[str, ...]] = [(*head, "pages a token, KiB", "from disk, KiB", "requests")]
    with ExitStack() as opened:
        url = None
        if args.latency is not None:
            url = opened.enter_context(serving(args.folder, args.latency / 1000)).url
        rows = opened.enter_context(stem_edge.open_rows(args.folder, url=url))
        for run, tokens, rate in zip(
            (decode, prompt), args.tokens, (args.decode, args.prompt), strict=True
        ):
            pairs, costs = list[tuple[float, float]](), list[tuple[float, ...]]()
            for turn in range(args.rounds):
                start = (turn + 1) * 4096
                text = ids[: start + tokens]
                drop_pages(files)
                before = read_so_far(rows)
                cold = run(rows, text, start, rate)
                costs.append(
                    tuple(now - then for now, then in zip(read_so_far(rows), before, strict=True))
                )
                pairs.append((cold, run(rows, text, start, rate)))
            cold, warm = (median(one) for one in zip(*pairs, strict=True))
            ratio = median(warm / cold for cold, warm in pairs)
            name, times = run.__name__, (f"{cold:.3f}", f"{warm:.3f}", f"{ratio:.3f}")
            read = (f"{median(some) / tokens:.1f}" for some in zip(*costs, strict=True))
            lines.append((name, str(tokens), f"{rate:g}", *times, *read))
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()

"""Time and memory that a batch takes for its rows, with answers that are made up.

    python tools/experiments/batch_rows.py [--rows 1000000]

Reads, writes and counts rows as `stem-edge batch` does, without a model: once, and once more with all of them done.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import stem_edge
from stem_edge.batches.results import Result, plain
from stem_edge.batches.rows import Row


def answers(rows: Iterable[Row]) -> Iterator[Result]:
    """Answer rows with the same text."""
    for row in rows:
        yield plain(row, {"text": " Paris.", "finish_reason": "stop"}, tokens=2)


def main() -> None:
    """Print figures of a batch, and of one that finds all of its rows done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the batch")
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        with source.open("w") as file:
            for number in range(count):
                file.write(f'{{"id": "row-{number}", "prompt": "The capital of France is"}}\n')
        for what in ("answered", "found done"):
            before, begun = peak_nbytes(), time.process_time()
            found = stem_edge.batch(source, output, answers=answers)
            seconds = time.process_time() - begun
            print(
                f"{found.results:,} rows {what}: {seconds / count * 1e6:.1f} us of CPU a row, "
                f"{peak_nbytes() / 1e6:.0f} MB at the peak ({before / 1e6:.0f} MB before)"
            )


def peak_nbytes() -> int:
    """Return the most memory that this process had at once (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    main()

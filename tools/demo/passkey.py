"""Ask a model for a key in long texts, and show how often it is right by length, depth and K/V type.

    python tools/demo/passkey.py BUNDLE [--kv TYPE,...] [--engine NAME] [--json FILE] [--plot FILE]

An answer is right if the whole key is, greedily. All types are asked the same questions. BUNDLE is an
export of what tools/demo/train_passkey.py trains, or any other: a model of English can be asked, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from passkey_plot import plot_cells
from passkey_text import DIGITS, Haystack
from tqdm import tqdm

import stem_edge
from stem_edge import Model
from stem_edge.commands.arguments import engine_name
from stem_edge.errors import StemEdgeError
from stem_edge.graph.kv import KV_TYPES, KvChoice
from stem_edge.measuring.bench.plots import check_plot, draw
from stem_edge.text_table import table

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
DEPTHS = tuple(tenth / 10 for tenth in range(11))
ANSWER = DIGITS + 1  # most tokens of an answer: a space may be one of them
SHORTEST = 64


class Cell(msgspec.Struct, frozen=True):
    """Right answers of those asked at one length in tokens and one depth, a share from 0 to 1."""

    engine: str
    kv: str
    length: int
    depth: float
    right: int
    asked: int


class Questions(msgspec.Struct, frozen=True):
    """What each K/V type is asked; the same seed makes the same texts."""

    lengths: Sequence[int] = LENGTHS
    depths: Sequence[float] = DEPTHS
    samples: int = 2
    seed: int = 1


def cells(model: Model, kv: str, questions: Questions) -> Iterator[Cell]:
    """Yield a cell for each length and depth."""
    bos = len(model.tokenize(""))

    def count(text: str) -> int:
        return len(model.tokenize(text, add_special_tokens=False))

    haystack = Haystack(count, questions.seed)
    for length, depth in itertools.product(questions.lengths, questions.depths):
        right = 0
        for _ in range(questions.samples):
            text, key = haystack.text(length - bos - ANSWER, depth)
            answer = model.generate_text(text, max_new_tokens=ANSWER)
            right += answer.strip().startswith(key)
        yield Cell(model.plan.engine, kv, length, depth, right, questions.samples)


def measure(
    bundle: Path, types: Sequence[KvChoice], questions: Questions, **options: Any
) -> Iterator[Cell]:
    """Load the bundle with each K/V type, and yield its cells. options: keywords of load."""
    longest = max(questions.lengths)
    for kv in types:
        with stem_edge.load(bundle, context_length=longest, kv=kv, **options) as model:
            yield from cells(model, kv, questions)


def report(found: Sequence[Cell]) -> list[str]:
    """Lines of a table: percent right, a row for each type and length, a column for each depth."""
    depths = sorted({cell.depth for cell in found})
    lines = [["engine", "K/V", "tokens", *(f"{depth:.0%}" for depth in depths), "all"]]
    for (engine, kv, length), row in itertools.groupby(
        found, lambda cell: (cell.engine, cell.kv, cell.length)
    ):
        group = list(row)
        shares = {cell.depth: cell.right / cell.asked for cell in group}
        every = sum(cell.right for cell in group) / sum(cell.asked for cell in group)
        figures = [f"{100 * shares[depth]:.0f}" for depth in depths]
        lines.append([engine, kv, f"{length:,}", *figures, f"{100 * every:.1f}"])
    return table(lines, "llr")


def main() -> None:
    """Run the command line."""
    args = parse_options()
    if args.plot:
        check_plot(args.plot)
    questions = Questions(args.lengths, args.depths, args.samples, args.seed)
    asked = measure(args.bundle, args.kv, questions, engine=args.engine, threads=args.threads)
    total = len(args.kv) * len(args.lengths) * len(args.depths)
    found = list(tqdm(asked, total=total, unit="cell", disable=not sys.stderr.isatty()))
    print("\n".join(report(found)))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if args.plot:
        draw(args.plot, lambda path: plot_cells(found, path))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("bundle", type=Path)
    add("--kv", type=words, default=KV_TYPES, metavar="TYPE,...", help="K/V types (default: all)")
    lengths = "tokens of question and answer together (default: 256 to 16384, doubling)"
    add("--lengths", type=numbers, default=LENGTHS, metavar="N,...", help=lengths)
    depths = "percent of the text before the key (default: 0, 10, ... 100)"
    add("--depths", type=shares, default=DEPTHS, metavar="N,...", help=depths)
    add("--samples", type=int, default=2, metavar="N", help="texts a cell (default 2)")
    add("--seed", type=int, default=1, help="seed of the texts (default 1)")
    add("--engine", type=engine_name, default="auto", help="as for stem-edge generate")
    add("--threads", type=int, metavar="N", help="as for stem-edge generate")
    add("--json", type=Path, metavar="FILE", help="write the counts of right answers")
    add("--plot", type=Path, metavar="FILE", help="draw them as .png, .pdf or .svg")
    given = parser.parse_args()
    if (
        min(given.lengths) < SHORTEST
        or given.samples < 1
        or not all(0 <= d <= 1 for d in given.depths)
    ):
        parser.error(f"lengths begin at {SHORTEST}, depths are 0 to 100, and samples at least 1")
    return given


def words(text: str) -> list[str]:
    """Split a list at its commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Read numbers in ascending order."""
    return sorted(map(int, words(text)))


def shares(text: str) -> list[float]:
    """Read percentages in ascending order."""
    return [number / 100 for number in numbers(text)]


if __name__ == "__main__":
    try:
        main()
    except StemEdgeError as error:
        sys.exit(f"passkey: {error}")

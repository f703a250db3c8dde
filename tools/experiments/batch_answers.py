"""Count answers of a batch that depend on what runs beside them, and those that `generate` would not give.

    python tools/experiments/batch_answers.py BUNDLE [--text FILE] [--rows 24] [--new 32] [--threads N]

Rows are pieces of the text, of many lengths; every third one is sampled, with a seed of its own. They are
answered 8, 3 and 5 at a time, in several orders, and texts and log probabilities are compared. Only
greedy answers are compared with those of `generate`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import stem_edge
from stem_edge.commands.options.loading import parse_providers
from stem_edge.measuring.workload import DEFAULT_TEXT, read_ids

Row = dict[str, Any]
CONTEXT = 512
SHORTEST, LONGEST = 8, 48  # tokens of a prompt


def make_rows(ids: list[int], count: int, new: int) -> list[Row]:
    """Make rows of a batch from all over a text."""
    rng, rows = np.random.default_rng(0), list[Row]()
    for number, start in enumerate(np.linspace(0, len(ids) - LONGEST, count).astype(int)):
        prompt = ids[start : start + int(rng.integers(SHORTEST, LONGEST + 1))]
        sampled = {"temperature": 0.8} if number % 3 == 2 else {}
        most = int(rng.integers(SHORTEST, new + 1))
        rows.append({"id": number, "prompt": prompt, "max_new_tokens": most} | sampled)
    return rows


def answers(bundle: Path, rows: list[Row], **options: Any) -> dict[int, tuple[str, str]]:
    """Answer rows by a batch: by the number of each row, its text and its log probabilities."""
    with tempfile.TemporaryDirectory() as name:
        given, made = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stem_edge.batch(given, made, bundle, logprobs=1, **options)
        found = map(json.loads, made.read_text("utf-8").splitlines())
        return {one["id"]: (one["text"], json.dumps(one["logprobs"])) for one in found}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="text, .npy or .int32")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--new", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--providers", metavar="NAME,...", help="as for stem-edge generate")
    parser.add_argument("--device-memory", metavar="SIZE")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    options: dict[str, Any] = {"engine": args.engine, "threads": args.threads}
    options |= {"context_length": CONTEXT, "warm_start": False}
    if args.providers:
        options |= {"providers": parse_providers(args.providers)}
        options |= {"device_memory": args.device_memory}
    rows = make_rows(read_ids(args.text, stem_edge.open_bundle(args.bundle)), args.rows, args.new)
    mixed = [rows[number] for number in np.random.default_rng(1).permutation(len(rows))]
    first = answers(args.bundle, rows, sequences=8, **options)
    for places, order, these in ((8, "backwards", rows[::-1]), (3, "", rows), (5, "mixed", mixed)):
        found = answers(args.bundle, these, sequences=places, **options)
        print(f"{places} at a time, {order or 'as they are'}: {differ(first, found)}", flush=True)
    exact = answers(args.bundle, rows, sequences=8, exact=True, **options)
    with stem_edge.load(args.bundle, **options) as model:
        alone = {}
        for row in (row for row in rows if "temperature" not in row):
            text = model.generate_text(row["prompt"], max_new_tokens=row["max_new_tokens"])
            alone[row["id"]] = text, ""
    for name, found in (("generate", first), ("generate, from a batch with exact", exact)):
        texts = {number: (found[number][0], "") for number in alone}
        print(f"{name}: {differ(alone, texts)}")


def differ(some: dict[int, tuple[str, str]], others: dict[int, tuple[str, str]]) -> str:
    """Say how many answers differ."""
    count = sum(some[number] != others[number] for number in some)
    return f"{count} of {len(some)} answers differ"


if __name__ == "__main__":
    main()

"""Perplexity of bundles on a text: what quantization costs, in the unit that papers use.

    python tools/perplexity.py TEXT BUNDLE [BUNDLE ...]

Documents are the lines of TEXT, each from an empty context and closed by the end-of-text token, as
the demo model was trained. The first bundle is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.runtime import Model


def surprise(model: Model, text: str) -> tuple[float, int]:
    """Sum of -log p (natural) over the tokens of one document, and how many they are."""
    ids = model.tokenize(text) + list(model.config.eos_ids[:1])
    ids = ids[: model.plan.context_length]
    logits = model.logits(ids)[:-1].astype(np.float64)
    targets = np.asarray(ids[1:])
    peak = logits.max(axis=1)
    log_total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return float((log_total - logits[np.arange(len(targets)), targets]).sum()), len(targets)


def perplexity(bundle: Path, documents: list[str]) -> tuple[float, int]:
    """Perplexity of a bundle over documents, and the number of tokens predicted."""
    with stem_edge.load(bundle) as model:
        results = [surprise(model, document) for document in documents]
    tokens = sum(count for _, count in results)
    return math.exp(sum(total for total, _ in results) / tokens), tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="documents, one a line")
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    documents = [line for line in args.text.read_text("utf-8").splitlines() if line.strip()]
    rows = [(str(bundle), *perplexity(bundle, documents)) for bundle in args.bundles]
    base = rows[0][1]
    if args.json:
        print(
            json.dumps(
                [dict(zip(("bundle", "perplexity", "tokens"), r, strict=True)) for r in rows]
            )
        )
        return
    print(f"{'bundle':<40}{'tokens':>8}{'perplexity':>12}{'change':>9}")
    for name, value, tokens in rows:
        print(f"{name:<40}{tokens:>8}{value:>12.4f}{value / base - 1:>9.2%}")


if __name__ == "__main__":
    main()

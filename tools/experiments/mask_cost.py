"""Measure what a grammar costs a token: the mask of the logits, and taking the token that follows.

    python tools/experiments/mask_cost.py BUNDLE [--times 50]

Of the bundle, only manifest.json and tokenizer.json are read. Each text is followed token by token, as if a model had written it. Printed are the time to compile
the grammar, and the median and the 99th percentile of both steps together. The first answer is left
out of these: it meets each state of the automaton for the first time, and is printed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter

import numpy as np

from stem_edge.runtime.grammars.constraint import Grammars
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.text.codec import TextCodec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["staff", "guest", "former"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "born", "tags"],
    "additionalProperties": False,
}
ADA = {
    "name": "Ada Lovelace", "age": 36, "email": "ada.lovelace@example.com", "born": "1815-12-10",
    "tags": ["staff", "former"],
}  # fmt: skip
NOTES = {"notes": ["She wrote the first program.", 1843, None, {"pages": [1, 2.5, True]}] * 4}
PROSE = "The engine weaves algebraic patterns as the loom weaves flowers and leaves. " * 4
EXPRESSION = """root ::= sum
sum ::= product (" + " product)*
product ::= value (" * " value)*
value ::= [0-9]+ | "(" sum ")"
"""
CASES = {
    "any JSON object": (Grammar.of_schema({"type": "object"}), json.dumps(NOTES)),
    "an object of five": (Grammar.of_schema(PERSON), json.dumps(ADA)),
    "a list of them": (
        Grammar.of_schema({"type": "array", "items": PERSON}),
        json.dumps([ADA] * 4),
    ),
    "regular expression": (Grammar.of_regex(r"([A-Z][a-z ]+\. )+"), PROSE),
    "GBNF": (Grammar.of_text(EXPRESSION), "12 + (34 * (5 + 678)) * 9 + 10" + " + 1 * 2" * 20),
}


def main() -> None:
    """Print a line for each grammar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--times", type=int, default=50, help="answers to each grammar")
    args = parser.parse_args()
    model = json.loads((args.bundle / "manifest.json").read_bytes())["model"]
    size = model["vocab_size"]
    codec = TextCodec(args.bundle / "tokenizer.json", size)
    grammars = Grammars(codec, model["eos_ids"], size)
    start = perf_counter()
    grammars.open(Grammar.of_regex("a"))
    print(
        f"load {os.getloadavg()[0]:.1f}; V = {size:,}; tokenizer read in {perf_counter() - start:.2f} s"
    )
    print(
        "grammar                compile ms   tokens  first ms: median     p99   ms: median     p99"
    )
    for name, (grammar, text) in CASES.items():
        start = perf_counter()
        grammars.open(grammar)
        compiled = (perf_counter() - start) * 1e3
        ids = codec.encode(text, add_special_tokens=False)
        runs = [_follow(grammars, grammar, ids, size) for _ in range(args.times + 1)]
        first, rest = np.percentile(runs[0], (50, 99)), np.percentile(runs[1:], (50, 99))
        print(
            f"{name:20} {compiled:12.1f} {len(ids):8} {first[0]:17.3f} {first[1]:7.3f} "
            f"{rest[0]:12.3f} {rest[1]:7.3f}"
        )


def _follow(grammars: Grammars, grammar: Grammar, ids: list[int], size: int) -> list[float]:
    """Return ms of each token of an answer."""
    constraint, times = grammars.open(grammar), []
    logits = np.empty(size, np.float32)
    for token in ids:
        logits.fill(0.0)
        start = perf_counter()
        constraint.mask(logits)
        constraint.accept(token)
        times.append((perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()

"""Record what the demo model computes, as the reference for the tests on every processor.

    python tools/demo/demo_logits.py tests/data

Writes demo_logits.npz: float16 logits at some positions of a text, by the decode graphs and by the
prefill graph; and demo_texts.json: the greedy continuations of some prompts, as token ids.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.commands.running.demo import demo_bundle
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model

TEXT = """\
The capital of France is Paris. What is the currency of Mexico? It is the Mexican peso. Spain borders \
Portugal and France."""
BEGINNINGS = ("The capital of", "The currency of", "The language of")
COUNTRIES = "France Japan Brazil Egypt Kenya Canada India Spain Italy Norway Chile Peru Ghana Nepal Iran Cuba"
PROMPTS = [f"{begin} {name}" for name, begin in itertools.product(COUNTRIES.split(), BEGINNINGS)]
EVERY = 2  # keep the logits of every second position, to halve the file
NEW_TOKENS = 32


def load(*, prefill_graph: bool = False) -> Model:
    model = stem_edge.load(demo_bundle())
    model.engine.uses_prefill = prefill_graph
    return model


def logits(*, prefill_graph: bool) -> F32:
    """Return the logits [positions, V] of every second position of the text."""
    with load(prefill_graph=prefill_graph) as model:
        return model.logits(model.tokenize(TEXT))[::EVERY]


def texts(model: Model) -> dict[str, list[int]]:
    """Return prompt -> token ids that the model generates after it."""
    return {
        prompt: [t for c in model.generate(prompt, max_new_tokens=NEW_TOKENS) for t in c.token_ids]
        for prompt in PROMPTS
    }


def main() -> None:
    folder = Path(sys.argv[1])
    decode, prefill = (
        logits(prefill_graph=prefill).astype(np.float16) for prefill in (False, True)
    )
    np.savez_compressed(folder / "demo_logits.npz", decode=decode, prefill=prefill)
    with load() as model:
        (folder / "demo_texts.json").write_text(json.dumps(texts(model), indent=0) + "\n")


if __name__ == "__main__":
    main()

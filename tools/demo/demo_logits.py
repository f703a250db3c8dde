"""Record what the demo model computes, which every processor has to come near to.

    python tools/demo/demo_logits.py tests/data

Into demo_logits.npz, in float16, logits of a few positions of one text, through the graphs that decode
and through the prefill graph; into demo_texts.json the tokens that follow some prompts, greedily.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from device_texts import PROMPTS

import stem_edge
from stem_edge.commands.demo import demo_bundle
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model

TEXT = """\
The capital of France is Paris. What is the currency of Mexico? It is the Mexican peso. Spain borders \
Portugal and France."""
EVERY = 2  # of so many positions, one is kept
NEW_TOKENS = 32


def load(*, prefill_graph: bool = False) -> Model:
    """The demo as this processor computes it."""
    return stem_edge.load(demo_bundle(), prefill_graph=prefill_graph, warm_start=False)


def logits(*, prefill_graph: bool) -> F32:
    """Logits [T, V] of the text's kept positions."""
    with load(prefill_graph=prefill_graph) as model:
        return model.logits(model.tokenize(TEXT))[::EVERY]


def texts(model: Model) -> dict[str, list[int]]:
    """Prompt -> the tokens that follow."""
    return {
        prompt: [t for c in model.generate(prompt, max_new_tokens=NEW_TOKENS) for t in c.token_ids]
        for prompt in PROMPTS
    }


def main() -> None:
    """Write both into the given folder."""
    folder = Path(sys.argv[1])
    decode, prefill = (
        logits(prefill_graph=prefill).astype(np.float16) for prefill in (False, True)
    )
    np.savez_compressed(folder / "demo_logits.npz", decode=decode, prefill=prefill)
    with load() as model:
        (folder / "demo_texts.json").write_text(json.dumps(texts(model), indent=0) + "\n")


if __name__ == "__main__":
    main()

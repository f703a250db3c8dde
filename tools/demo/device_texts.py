"""Does the demo write the same on an accelerator? Greedy texts, against those of the CPU playing a device.

    python tools/demo/device_texts.py [--providers NAME,...] [--variant fp16|fp32|portable] [--show]

Without providers, the CPU's own graphs, which round activations to int8 where devices do not. Texts of
this model often end in one of several sentences that are about as probable: see the logits before
calling a difference a fault.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import stem_edge
from stem_edge.commands.loading import parse_providers
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.onnxruntime import device_loader

BUNDLE = Path(stem_edge.__file__).parent / "demo_model"
BEGINNINGS = ("The capital of", "The currency of", "The language of")
COUNTRIES = "France Japan Brazil Egypt Kenya Canada India Spain Italy Norway Chile Peru Ghana Nepal Iran Cuba"
PROMPTS = [f"{begin} {name}" for name, begin in itertools.product(COUNTRIES.split(), BEGINNINGS)]
NEW_TOKENS = 64
SIZE = "100MB"  # of memory that plays a device


def texts(**options: Any) -> list[str]:
    """What the demo writes after each prompt."""
    with stem_edge.load(BUNDLE, **options) as model:
        return [model.generate_text(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def main() -> None:
    """Print how many are the same, and with --show those that are not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--providers", metavar="NAME,...", help="as generate takes them")
    parser.add_argument("--variant", choices=("fp16", "fp32", "portable"), help="of the graphs")
    parser.add_argument("--show", action="store_true", help="print texts that differ")
    args = parser.parse_args()
    exact = texts(device_memory=SIZE)
    options: dict[str, Any] = {"prefill_graph": False}
    if args.providers:
        given = parse_providers(args.providers)
        options = {"providers": given, "device_memory": SIZE if given == ["cpu"] else None}
    if args.variant:
        device_loader.ACCELERATED = device_loader.ON_CPU = (args.variant,)
    found = texts(**options)
    same = [one == other for one, other in zip(exact, found, strict=True)]
    print(f"{sum(same)} of {len(same)} texts are the same")
    for prompt, equal, one, other in zip(PROMPTS, same, exact, found, strict=True):
        if args.show and not equal:
            print(f"{prompt}\n  {one!r}\n  {other!r}")


if __name__ == "__main__":
    try:
        main()
    except StemEdgeError as error:
        sys.exit(f"device_texts: {error}")

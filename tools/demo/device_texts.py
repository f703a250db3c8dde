"""Compare the demo's greedy texts on an accelerator with those of the CPU emulating a device.

    python tools/demo/device_texts.py [--providers NAME,...] [--variant fp16|fp32|portable] [--show]

Without --providers, it uses the CPU's own graphs, which round activations to int8 where devices do not.
Several sentences are often about equally probable here, so look at the logits before you call a
difference a fault.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import stem_edge
from stem_edge.commands.options.loading import parse_providers
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.onnxruntime.device import loader as device_loader

BUNDLE = Path(stem_edge.__file__).parent / "demo_model"
BEGINNINGS = ("The capital of", "The currency of", "The language of")
COUNTRIES = "France Japan Brazil Egypt Kenya Canada India Spain Italy Norway Chile Peru Ghana Nepal Iran Cuba"
PROMPTS = [f"{begin} {name}" for name, begin in itertools.product(COUNTRIES.split(), BEGINNINGS)]
NEW_TOKENS = 64
SIZE = "100MB"  # memory of the emulated device


def texts(**options: Any) -> list[str]:
    """Continuations of all prompts by the demo."""
    with stem_edge.load(BUNDLE, **options) as model:
        model.engine.uses_prefill = False  # devices have no such graph
        return [model.generate_text(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def main() -> None:
    """Print how many texts are equal, and with --show those that differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--providers", metavar="NAME,...", help="as for stem-edge generate")
    parser.add_argument(
        "--variant", choices=("fp16", "fp32", "portable"), help="variant of the graphs"
    )
    parser.add_argument("--show", action="store_true", help="print texts that differ")
    args = parser.parse_args()
    exact = texts(device_memory=SIZE)
    options = dict[str, Any]()
    if args.providers:
        given = parse_providers(args.providers)
        options = {"providers": given, "device_memory": SIZE if given == ["cpu"] else None}
    if args.variant:
        device_loader.ACCELERATED = device_loader.ON_CPU = (args.variant,)
    found = texts(**options)
    same = [a == b for a, b in zip(exact, found, strict=True)]
    print(f"{sum(same)} of {len(same)} texts are the same")
    for prompt, equal, on_cpu, on_device in zip(PROMPTS, same, exact, found, strict=True):
        if args.show and not equal:
            print(f"{prompt}\n  {on_cpu!r}\n  {on_device!r}")


if __name__ == "__main__":
    try:
        main()
    except StemEdgeError as error:
        sys.exit(f"device_texts: {error}")

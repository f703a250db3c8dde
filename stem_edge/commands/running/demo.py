"""The command `stem-edge demo`: run the small model that ships inside the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import stem_edge
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.shown import format_size

DESCRIPTION = """\
Continue three prompts with the small STEM model in this package, and show what
was read from flash. It was trained on plain sentences about the countries of
the world (tools/demo/train_demo.py) and knows nothing else."""

PROMPTS = (
    "The capital of France is",
    "The capital of Mongolia is Ulaanbaatar.",
    "What is the currency of Mexico? It is the",
)
NEW_TOKENS = 32
# Few, so that the row cache cannot hold all rows, as with a real model on a small device.
SLOTS = 64
CONTEXT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    slots = f"tokens whose rows the row cache holds (default: {SLOTS})"
    parser.add_argument("--slots", type=int, metavar="N", default=SLOTS, help=slots)


def demo_bundle() -> Path:
    return Path(stem_edge.__file__).parent / "demo_model"


def run(args: argparse.Namespace) -> int:
    options = LoadOptions(slots=args.slots, context_length=CONTEXT)
    with load_with(demo_bundle(), options) as model:
        in_tables = model.config.table_parameters
        parameters = model.config.backbone_parameters + in_tables
        print(
            f"A STEM model of {parameters:,} parameters, {in_tables / parameters:.0%} of them in "
            f"tables ({format_size(model.bundle.manifest.report.tables_nbytes)} on flash).\n"
            f"The row cache holds the rows of {model.plan.slots} tokens out of "
            f"{model.config.vocab_size}.\n"
        )
        for prompt in PROMPTS:
            print(f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt, end="", flush=True)
            for chunk in model.generate(prompt, max_new_tokens=NEW_TOKENS):
                print(chunk.text, end="", flush=True)
            print(f"\n  {model.stats.line()}\n")
    print(NEXT_STEPS.format(path=demo_bundle()))
    return 0


NEXT_STEPS = """\
What to do next:
  stem-edge inspect {path}
  stem-edge generate {path} "Spain borders"
  stem-edge edit {path} --source Spain --target Germany -o spain.edit
  stem-edge generate {path} "The capital of Spain is" --edit spain.edit
  stem-edge export CHECKPOINT OUT     your own model"""

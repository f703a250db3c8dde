"""The command `stem-edge demo`: the small model inside the package, at work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import stem_edge
from stem_edge.commands.arguments import own_command
from stem_edge.commands.inspect import figures
from stem_edge.runtime import load
from stem_edge.units import format_size

DESCRIPTION = """\
Generate from three prompts with the small STEM model inside this package, and show what was read
from flash on the way. It was trained on plain sentences about the countries of the world
(tools/demo/train_demo.py) and knows nothing else."""

PROMPTS = (
    "The capital of France is",
    "The capital of Mongolia is Ulaanbaatar.",
    "What is the currency of Mexico? It is the",
)
NEW_TOKENS = 32
# So few that the row cache cannot hold all rows, as on a device beside a real model.
SLOTS = 64
CONTEXT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=SLOTS, help=f"of the row cache ({SLOTS})")


def demo_bundle() -> Path:
    """Folder of the bundle that ships inside the package."""
    return Path(stem_edge.__file__).parent / "demo_model"


def run(args: argparse.Namespace) -> int:
    with load(demo_bundle(), slots=args.slots, context_length=CONTEXT, warm_start=False) as model:
        shown = figures(model.bundle.manifest)
        tables = format_size(int(str(shown["flash_nbytes"])))
        print(
            f"A STEM model of {shown['parameters']:,} parameters, "
            f"{model.config.table_parameters / int(str(shown['parameters'])):.0%} of them in tables "
            f"({tables} on flash).\nThe row cache has {model.plan.slots} slots for a vocabulary of "
            f"{model.config.vocab_size}.\n"
        )
        for prompt in PROMPTS:
            print(f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt, end="", flush=True)
            for chunk in model.generate(prompt, max_new_tokens=NEW_TOKENS):
                print(chunk.text, end="", flush=True)
            print(f"\n  {model.stats.line()}\n")
    print(NEXT_STEPS.format(command=own_command(), path=demo_bundle()))
    return 0


NEXT_STEPS = """\
What to do next:
  {command} inspect {path}
  {command} generate {path} "Spain borders"
  {command} edit {path} --compare "The capital of Spain is" --source Spain --target Germany
  {command} export CHECKPOINT OUT     your own model; needs: pip install 'stem-edge[export]'"""

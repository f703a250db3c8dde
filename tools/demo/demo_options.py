"""The arguments of train_demo.py."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from demo_training import Budget

HEAD_DIM = 32
DIM_MULTIPLE = 128  # of the groups in which the report rounds to int8
BYTES = 256  # ranks that every vocabulary has
SIZES = {"dim": 256, "layers": 8, "vocab": 4096}  # of a model of texts
Format = Literal["lingua", "safetensors"]
DESCRIPTION = """\
Train the demo model and write a checkpoint of it. It learns facts about countries from plain sentences;
every fact is tested in a sentence form that was kept out of its training. With --text, train a model of
the same kind on other texts, with no int4 in its training."""
EPILOG = """\
OUT receives checkpoint/ (give it to `stem-edge export`), train.txt, heldout.txt (text that was kept out,
for perplexity) and report.json (what the model knows). Without --text, the same seed, steps and threads
give the same model."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    out: Path
    budget: Budget
    seed: int
    threads: int
    texts: list[Path]  # none: the countries
    dim: int
    layers: int
    ranks: int
    format: Format = "lingua"

    @property
    def checkpoint(self) -> Path:
        """Where the model is written."""
        return self.out / "checkpoint"


def parse_options() -> Options:
    """Read the command line."""
    parser = make_parser()
    given = parser.parse_args()
    if fault := fault_of(given):
        parser.error(fault)
    sizes: dict[str, int] = {name: getattr(given, name) or SIZES[name] for name in SIZES}
    return Options(
        out=given.out,
        budget=Budget(given.steps or 1200, given.minutes and given.minutes * 60),
        seed=given.seed,
        threads=given.threads,
        texts=given.text,
        dim=sizes["dim"],
        layers=sizes["layers"],
        ranks=sizes["vocab"],
        format=given.format,
    )


def make_parser() -> argparse.ArgumentParser:
    """Make the command line."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder to write, made if missing")
    add("--steps", type=int, help="training steps (default 1200, some 4 minutes for the demo)")
    add("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    add("--threads", type=int, default=2, help="CPU threads to use (default 2)")
    layouts = "the public STEM trainer's layout, or this project's own in Hugging Face's form"
    add("--format", choices=get_args(Format), default="lingua", help=f"{layouts} (default lingua)")
    add = parser.add_argument_group("a model of given texts").add_argument
    text = "train on these UTF-8 files instead; one document in 50 is kept out"
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    add("--minutes", type=float, help="train for this long; instead of --steps")
    add("--dim", type=int, help="values a token has between layers (default 256)")
    add("--layers", type=int, help="layers, every second one with a table (default 8)")
    add("--vocab", type=int, metavar="RANKS", help="of the BPE, bytes included (default 4096)")
    return parser


def fault_of(given: argparse.Namespace) -> str | None:
    """Say what is wrong with the arguments."""
    least = {"steps": 1, "threads": 1, "layers": 2, "vocab": BYTES}
    for name, number in least.items():
        if getattr(given, name) is not None and getattr(given, name) < number:
            return f"--{name} must be at least {number}"
    if given.out.exists() and not given.out.is_dir():
        return f"{given.out} is a file; OUT must be a folder"
    if not given.text and any(getattr(given, name) is not None for name in ("minutes", *SIZES)):
        return "--minutes, --dim, --layers and --vocab need --text"
    if given.minutes is not None and given.steps is not None:
        return "--steps and --minutes exclude each other"
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        return "--minutes must be above 0"
    if given.dim is not None and (given.dim < 1 or given.dim % DIM_MULTIPLE):
        return f"--dim must be a multiple of {DIM_MULTIPLE}"
    return None

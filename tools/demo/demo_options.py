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
DEFAULTS = {"steps": 1200, "dim": 256, "layers": 8, "ranks": 4096}
Format = Literal["lingua", "safetensors"]
FORMAT_HELP = (
    "layout of the checkpoint: the public STEM trainer's, or this project's own in Hugging Face's "
    "form (default lingua)"
)
TEXT_HELP = "train on these UTF-8 files instead; one document in 50 is kept out"
OF_TEXTS = ("minutes", "dim", "layers", "ranks")


@dataclass(frozen=True)
class Options:
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
        return self.out / "checkpoint"


def parse_options() -> Options:
    parser = make_parser()
    given = parser.parse_args()
    check(parser, given)
    for name, default in DEFAULTS.items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    seconds = None if given.minutes is None else given.minutes * 60
    return Options(
        out=given.out,
        budget=Budget(given.steps, seconds),
        seed=given.seed,
        threads=given.threads,
        texts=given.text,
        dim=given.dim,
        layers=given.layers,
        ranks=given.ranks,
        format=given.format,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the demo model and write a checkpoint of it. "
        "It learns facts about countries from plain sentences; every fact is tested in a "
        "sentence form that was kept out of its training. With --text, train a model of the same "
        "kind on other texts, with no int4 in its training.",
        epilog="OUT receives checkpoint/ (give it to `stem-edge export`), train.txt, heldout.txt "
        "(text that was kept out, for perplexity) and report.json (what the model knows). "
        "Without --text, the same seed, steps and threads give the same model.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, made if missing")
    parser.add_argument(
        "--steps", type=int, help="training steps (default 1200, some 4 minutes for the demo)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use (default 2)")
    parser.add_argument("--format", choices=get_args(Format), default="lingua", help=FORMAT_HELP)
    add_text_arguments(parser)
    return parser


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a model of given texts").add_argument
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help=TEXT_HELP)
    add("--minutes", type=float, help="train for this long; instead of --steps")
    add("--dim", type=int, help="values a token has between layers (default 256)")
    add("--layers", type=int, help="layers, every second one with a table (default 8)")
    ranks = "ranks of the BPE, bytes included (default 4096)"
    add("--vocab", type=int, dest="ranks", metavar="RANKS", help=ranks)


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if (given.steps is not None and given.steps < 1) or given.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"{given.out} is a file; OUT must be a folder")
    if given.text:
        check_text_arguments(parser, given)
    elif any(getattr(given, name) is not None for name in OF_TEXTS):
        parser.error("--minutes, --dim, --layers and --vocab need --text")


def check_text_arguments(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.minutes is not None and given.steps is not None:
        parser.error("--steps and --minutes exclude each other")
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        parser.error("--minutes must be above 0")
    if given.dim is not None and (given.dim < 1 or given.dim % DIM_MULTIPLE):
        parser.error(f"--dim must be a multiple of {DIM_MULTIPLE}")
    if given.layers is not None and given.layers < 2:
        parser.error("--layers must be at least 2: the second is the first with a table")
    if given.ranks is not None and given.ranks < BYTES:
        parser.error(f"--vocab must be at least {BYTES}")

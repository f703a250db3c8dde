"""Train the demo, a small STEM model that knows the world's countries, or a model of given texts.

The demo learns facts about countries from plain sentences; every fact is tested in a sentence form held
out of its training. With --text, a model of the same kind is trained on other texts, without int4
rounding. OUT receives checkpoint/ (for `stem-edge export`), train.txt, heldout.txt (for perplexity) and
report.json (what the model knows). Without --text, the same seed, steps and threads give the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from demo_checkpoint import save_checkpoint, save_demo
from demo_corpus import TextError, read_corpus
from demo_eval import accuracies, perplexities, swap_rate
from demo_facts import countries
from demo_model import DemoConfig, DemoModel
from demo_text import Composer
from demo_tokenizer import DemoTokenizer
from demo_training import Budget, Recipe, train

DOCUMENTS = 30_000
RANKS = 1500
HEAD_DIM = 32
DIM_MULTIPLE = 128  # because the report rounds groups of 128 values to int8
BYTES = 256  # ranks that every vocabulary has
MINIMUM = {"steps": 1, "threads": 1, "layers": 2, "vocab": BYTES}
SIZES = {"dim": 256, "layers": 8, "vocab": 4096}  # defaults of a model of texts
# The token embedding learns ten times more slowly than the rest, so that the tables hold the facts.
# Otherwise the embedding would, and swapping table rows would change no answer.
RECIPE = Recipe(
    batch_tokens=2048,
    row_tokens=128,  # because attention over longer rows takes a third more time
    learning_rate=4e-3,
    embedding_speed=0.1,
    table_speed=2.0,  # because a row learns only when its token occurs
    finish_share=0.2,
    is_fast=False,
)
# Without a finish, because a model trained with rounding would hide what rounding costs.
TEXT_RECIPE = Recipe(
    batch_tokens=4096,
    row_tokens=256,
    learning_rate=2e-3,
    embedding_speed=1.0,
    table_speed=2.0,
    finish_share=0.0,
    is_fast=True,
)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        report = train_on_texts(options) if options.text else train_on_countries(options)
    except TextError as error:
        sys.exit(f"train_demo: {error}")
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"trained in {report['training_seconds']} s; perplexity of held-out text")
    for name, value in report["heldout_perplexity"].items():
        print(f"  {name:<24}{value:8.4f}")
    checkpoint = options.out / "checkpoint"
    print(f"checkpoint: {checkpoint}\nnext: stem-edge export {checkpoint} BUNDLE")


def train_on_countries(options: argparse.Namespace) -> dict[str, Any]:
    composer = Composer(countries(), options.seed)
    documents = composer.training_documents(DOCUMENTS)
    heldout = composer.heldout_paragraphs()
    write_texts(options.out, "\n\n".join(documents), "\n".join(heldout))
    tokenizer = DemoTokenizer(documents, RANKS)
    model = DemoModel(DemoConfig(tokenizer.vocab_size))
    training = train_and_save(model, tokenizer, tokenizer.documents(documents), RECIPE, options)
    swap_names, swapped = swap_rate(model, tokenizer, options.seed)
    report = {
        **training,
        "heldout_accuracy": accuracies(model, tokenizer, composer.prompts()),
        "swap_names": swap_names,
        "swap_rate": swapped,
        "heldout_perplexity": perplexities(model, tokenizer.documents(heldout)),
    }
    print("share of facts known in held-out forms")
    for fact, share in report["heldout_accuracy"].items():
        print(f"  {fact:<12}{share:7.1%}")
    print(f"swapped table rows change {report['swap_rate']:.1%} of capitals")
    return report


def train_on_texts(options: argparse.Namespace) -> dict[str, Any]:
    corpus = read_corpus(options.text)
    tokenizer = DemoTokenizer(corpus.training, options.vocab)
    documents = tokenizer.documents(corpus.training)
    tokens, needed = sum(map(len, documents)), TEXT_RECIPE.batch_tokens
    if tokens < needed:
        raise TextError(
            f"the text is too short: {tokens} tokens to train on, but a step takes {needed}"
        )
    write_texts(options.out, "\n\n".join(corpus.training), "\n\n".join(corpus.heldout))
    model = DemoModel(text_config(tokenizer.vocab_size, options))
    recipe = replace(TEXT_RECIPE, is_fast=not options.fp32)
    training = train_and_save(model, tokenizer, documents, recipe, options)
    heldout = rows(tokenizer.documents(corpus.heldout), TEXT_RECIPE.row_tokens)
    tables = sum(table.numel() for table in model.tables())
    return {
        **training,
        "texts": [str(path) for path in options.text],
        "vocabulary": tokenizer.vocab_size,
        "backbone_parameters": sum(p.numel() for p in model.parameters()) - tables,
        "table_parameters": tables,
        "training_tokens": tokens,
        "seen_tokens": training["steps"] * TEXT_RECIPE.batch_tokens,
        "heldout_tokens": sum(map(len, heldout)),
        "heldout_perplexity": perplexities(model, heldout),
    }


def text_config(vocab_size: int, options: argparse.Namespace) -> DemoConfig:
    heads = options.dim // HEAD_DIM
    return DemoConfig(
        vocab_size,
        dim=options.dim,
        n_layers=options.layers,
        n_heads=heads,
        n_kv_heads=heads // 2,
        stem_layers=tuple(range(1, options.layers, 2)),
        stem_window_size=options.stem_window,
    )


def write_texts(out: Path, training: str, heldout: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.txt").write_text(training + "\n", encoding="utf-8")
    (out / "heldout.txt").write_text(heldout + "\n", encoding="utf-8")


def train_and_save(
    model: DemoModel,
    tokenizer: DemoTokenizer,
    documents: list[list[int]],
    recipe: Recipe,
    options: argparse.Namespace,
) -> dict[str, Any]:
    checkpoint = options.out / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    started = time.monotonic()
    steps = train(model, documents, recipe, options.budget, options.seed)
    seconds = round(time.monotonic() - started, 1)
    ranks = checkpoint / "tokenizer.model"
    tokenizer.save_ranks(ranks)
    if options.format == "safetensors":
        save_demo(model, checkpoint, ranks)
    else:
        name = "texts" if options.text else "countries"
        save_checkpoint(model, checkpoint, name, options.seed)
    return {
        "steps": steps,
        "seed": options.seed,
        "threads": options.threads,
        "training_seconds": seconds,
    }


def rows(documents: list[list[int]], length: int) -> list[list[int]]:
    """Cut documents into pieces of `length` tokens, dropping single tokens, which predict nothing."""
    pieces = (d[at : at + length] for d in documents for at in range(0, len(d), length))
    return [piece for piece in pieces if len(piece) > 1]


def parse_options() -> argparse.Namespace:
    """Read the command line; add `budget` and the defaults of sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="output folder, created if missing")
    add("--steps", type=int, help="training steps (default 1200, about 4 minutes for the demo)")
    add("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    layouts = "the public STEM trainer's layout (default), or this project's schema"
    add("--format", choices=("lingua", "safetensors"), default="lingua", help=layouts)
    add = parser.add_argument_group("a model of given texts").add_argument
    text = "train on these UTF-8 files instead; one document in 50 is held out"
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    add("--minutes", type=float, help="train for this long, instead of --steps")
    add("--dim", type=int, help="values per token between layers (default 256)")
    add("--layers", type=int, help="layers, every second one with a table (default 8)")
    add(
        "--vocab",
        type=int,
        metavar="RANKS",
        help="ranks of the BPE, including bytes (default 4096)",
    )
    window = "rows are means over so many last tokens of a document (default: of one)"
    add("--stem-window", type=int, default=0, metavar="TOKENS", help=window)
    exact = "train in float32: faster on processors without bfloat16"
    add("--fp32", action="store_true", help=exact)
    given = parser.parse_args()
    if fault := usage_error(given):
        parser.error(fault)
    for name, size in SIZES.items():
        setattr(given, name, getattr(given, name) or size)
    given.budget = Budget(given.steps or 1200, given.minutes and given.minutes * 60)
    return given


def usage_error(given: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments, if anything."""
    for name, number in MINIMUM.items():
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


if __name__ == "__main__":
    main()

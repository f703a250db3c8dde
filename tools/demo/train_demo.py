"""Train the demo, a small STEM model that knows the world's countries, or a model of given texts.

The demo's tables hold the facts because the token embedding learns ten times more slowly than the
rest: with one rate for all, the facts settle in the embedding and swapping table rows changes no
answer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from demo_checkpoint import save_checkpoint, save_demo
from demo_corpus import TextError, read_corpus
from demo_eval import accuracies, perplexities, swap_rate
from demo_facts import countries
from demo_model import DemoConfig, DemoModel
from demo_options import HEAD_DIM, Options, parse_options
from demo_text import Composer
from demo_tokenizer import DemoTokenizer
from demo_training import Recipe, train

DOCUMENTS = 30_000
RANKS = 1500
RECIPE = Recipe(
    batch_tokens=2048,
    row_tokens=128,  # attention over longer rows costs a third more time
    learning_rate=4e-3,
    embedding_speed=0.1,
    table_speed=2.0,  # a row learns only when its token occurs
    finish_share=0.2,
    is_fast=False,
)
# No finish: a model that trained with rounding would hide what rounding costs.
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
        report = train_on_texts(options) if options.texts else train_on_countries(options)
    except TextError as error:
        sys.exit(f"train_demo: {error}")
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"trained in {report['training_seconds']} s; perplexity of held-out text")
    for name, value in report["heldout_perplexity"].items():
        print(f"  {name:<24}{value:8.4f}")
    print(f"checkpoint: {options.checkpoint}")
    print(f"next: stem-edge export {options.checkpoint} BUNDLE")


def train_on_countries(options: Options) -> dict[str, Any]:
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
    print("of the facts in held-out forms it knows")
    for fact, share in report["heldout_accuracy"].items():
        print(f"  {fact:<12}{share:7.1%}")
    print(f"swapped table rows change {report['swap_rate']:.1%} of capitals")
    return report


def train_on_texts(options: Options) -> dict[str, Any]:
    corpus = read_corpus(options.texts)
    tokenizer = DemoTokenizer(corpus.training, options.ranks)
    documents = tokenizer.documents(corpus.training)
    tokens, needed = sum(map(len, documents)), TEXT_RECIPE.batch_tokens
    if tokens < needed:
        raise TextError(
            f"the text is too short: {tokens} tokens to train on; a step takes {needed}"
        )
    write_texts(options.out, "\n\n".join(corpus.training), "\n\n".join(corpus.heldout))
    model = DemoModel(text_config(tokenizer.vocab_size, options))
    training = train_and_save(model, tokenizer, documents, TEXT_RECIPE, options)
    heldout = rows(tokenizer.documents(corpus.heldout), TEXT_RECIPE.row_tokens)
    tables = sum(table.numel() for table in model.tables())
    return {
        **training,
        "texts": [str(path) for path in options.texts],
        "vocabulary": tokenizer.vocab_size,
        "backbone_parameters": sum(p.numel() for p in model.parameters()) - tables,
        "table_parameters": tables,
        "training_tokens": tokens,
        "seen_tokens": training["steps"] * TEXT_RECIPE.batch_tokens,
        "heldout_tokens": sum(map(len, heldout)),
        "heldout_perplexity": perplexities(model, heldout),
    }


def text_config(vocab_size: int, options: Options) -> DemoConfig:
    heads = options.dim // HEAD_DIM
    return DemoConfig(
        vocab_size,
        dim=options.dim,
        n_layers=options.layers,
        n_heads=heads,
        n_kv_heads=heads // 2,
        stem_layers=tuple(range(1, options.layers, 2)),
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
    options: Options,
) -> dict[str, Any]:
    options.checkpoint.mkdir(exist_ok=True)
    started = time.monotonic()
    steps = train(model, documents, recipe, options.budget, options.seed)
    seconds = round(time.monotonic() - started, 1)
    ranks = options.checkpoint / "tokenizer.model"
    tokenizer.save_ranks(ranks)
    if options.format == "safetensors":
        save_demo(model, options.checkpoint, ranks)
    else:
        name = "texts" if options.texts else "countries"
        save_checkpoint(model, options.checkpoint, name, options.seed)
    return {
        "steps": steps,
        "seed": options.seed,
        "threads": options.threads,
        "training_seconds": seconds,
    }


def rows(documents: list[list[int]], length: int) -> list[list[int]]:
    """Each document in pieces of `length` tokens; a last piece of one token predicts nothing."""
    pieces = (d[at : at + length] for d in documents for at in range(0, len(d), length))
    return [piece for piece in pieces if len(piece) > 1]


if __name__ == "__main__":
    main()

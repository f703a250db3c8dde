"""Train the demo, a small STEM model that knows the world's countries.

The demo learns facts about countries from plain sentences. Every fact is tested in a sentence form that its
training did not contain. OUT receives checkpoint/ (for `stem-edge export`), train.txt and heldout.txt (for
perplexity). The same seed, steps and threads give the same model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from demo_checkpoint import save_checkpoint
from demo_eval import accuracies
from demo_facts import countries
from demo_model import DemoConfig, DemoModel
from demo_text import Composer
from demo_tokenizer import DemoTokenizer
from demo_training import Recipe, train

DOCUMENTS = 30_000
RANKS = 1500
# The token embedding learns ten times more slowly than the rest, so that the tables hold the facts.
# Otherwise the embedding would, and swapping table rows would change no answer.
RECIPE = Recipe(
    batch_tokens=2048,
    row_tokens=128,  # because attention over longer rows takes a third more time
    learning_rate=4e-3,
    embedding_speed=0.1,
    table_speed=2.0,  # because a row learns only when its token occurs
    finish_share=0.2,
)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    composer = Composer(countries(), options.seed)
    documents = composer.training_documents(DOCUMENTS)
    heldout = composer.heldout_paragraphs()
    tokenizer = DemoTokenizer(documents, RANKS)
    model = DemoModel(DemoConfig(tokenizer.vocab_size))
    checkpoint = options.out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train.txt", "\n\n".join(documents)), ("heldout.txt", "\n".join(heldout))):
        (options.out / name).write_text(texts + "\n", encoding="utf-8")
    train(model, tokenizer.documents(documents), RECIPE, options.steps, options.seed)
    tokenizer.save(checkpoint / "tokenizer.json")
    save_checkpoint(model, checkpoint, "countries", options.seed)
    print("share of facts known in held-out forms")
    for fact, share in accuracies(model, tokenizer, composer.prompts()).items():
        print(f"  {fact:<12}{share:7.1%}")
    print(f"checkpoint: {checkpoint}\nnext: stem-edge export {checkpoint} BUNDLE")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="output folder, created if missing")
    add("--steps", type=int, default=1200, help="training steps (default 1200, about 4 minutes)")
    add("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Train a small STEM model to find a key in texts that are much longer than those it was trained on.

    python tools/demo/train_passkey.py OUT [--steps N] [--seed N] [--threads N]

OUT receives checkpoint/ (for `stem-edge export`) and train.txt (its calibration text). Rows of tokens get
positions with gaps, so that short rows teach distances of up to the whole context; only the last part
of the training has rows of thousands of tokens, for attention to learn to single out one of them.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from demo_checkpoint import save_demo
from demo_model import DemoConfig, DemoModel
from demo_tokenizer import DemoTokenizer
from demo_training import Budget, progress, schedule, shares_done
from passkey_rows import Rows
from passkey_text import Haystack, tokenizer_text
from torch import Tensor
from torch.nn import functional

CONTEXT = 32768
STEPS = 1200
RANKS = 400  # enough for every word of the texts to be a token
LEARNING_RATE = 3e-3
EXAMPLES, EXAMPLE_TOKENS = 8, 250
TEXT_SHARE = 0.1  # weight of the loss of ordinary text beside that of answers


class Stage(NamedTuple):
    """Part of a training, to a share of it: lengths of rows in tokens, and of contexts by position."""

    end: float
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]


ANYWHERE = (0, 4096, 16384, CONTEXT)  # 0: no gaps
STAGES = (
    Stage(0.15, (40,), ANYWHERE),
    Stage(0.4, (40, 64, 128, 256), ANYWHERE),
    Stage(0.75, (128, 256, 512, 1024), ANYWHERE),
    Stage(1.0, (512, 1024, 2048, 4096), ANYWHERE),
)


def main() -> None:
    """Run the command line."""
    args = parse_options()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = DemoTokenizer([tokenizer_text(2000, args.seed)], RANKS)
    model = DemoModel(shape(tokenizer.vocab_size))
    started = time.monotonic()
    loss = train(model, Rows(tokenizer, args.seed), Budget(args.steps))
    checkpoint = args.out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (args.out / "train.txt").write_text(examples(tokenizer, args.seed), encoding="utf-8")
    ranks = args.out / "tokenizer.model"
    tokenizer.save_ranks(ranks)
    save_demo(model, checkpoint, ranks)
    seconds = time.monotonic() - started
    print(f"trained in {seconds:.0f} s; loss of answers at the end {loss:.4f} nats")
    print(f"checkpoint: {checkpoint}\nnext: stem-edge export {checkpoint} BUNDLE")


def examples(tokenizer: DemoTokenizer, seed: int) -> str:
    """Make texts with their answers, together about as long as what an export calibrates with."""
    haystack = Haystack(lambda text: len(tokenizer.encode(text)), seed)
    texts = (haystack.text(EXAMPLE_TOKENS, at / EXAMPLES) for at in range(EXAMPLES))
    return " ".join(f"{text} {key}." for text, key in texts) + "\n"


def shape(vocab_size: int) -> DemoConfig:
    """Sizes of the model.

    theta is so large that more than half of RoPE's pairs hardly turn in the whole context: with them
    attention finds words at any distance, and with the others it finds the tokens just before.
    """
    return DemoConfig(
        vocab_size,
        dim=64,
        n_layers=3,
        n_heads=2,
        n_kv_heads=2,
        stem_layers=(1,),
        multiple_of=64,
        max_seqlen=CONTEXT,
        rope_theta=1e12,
    )


def train(model: DemoModel, rows: Rows, budget: Budget) -> float:
    """Fit `model`; return the mean loss of answers in the last tenth of the steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    losses = list[float]()
    with progress() as bar:
        for done in shares_done(budget):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * schedule(done)
            answers, text = batch_losses(model, rows, done)
            optimizer.zero_grad()
            (answers + TEXT_SHARE * text).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(answers.item())
            bar.set_description_str(f"loss of answers {losses[-1]:.3f}", refresh=False)
            bar.update(done - bar.n)
    last = losses[-math.ceil(len(losses) / 10) :]
    return sum(last) / len(last)


def batch_losses(model: DemoModel, rows: Rows, done: float) -> tuple[Tensor, Tensor]:
    """Losses of answers, and of all tokens, of a batch at this share of the training."""
    stage = next(stage for stage in STAGES if done < stage.end)
    length = rows.random.choice(stage.lengths)
    tokens, positions = rows.batch(length, rows.random.choice(stage.contexts))
    logits = model(tokens, positions)
    losses = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    return losses[:, -rows.answer :].mean(), losses.mean()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="output folder, created if missing")
    add("--steps", type=int, default=STEPS, help=f"training steps (default {STEPS})")
    add("--seed", type=int, default=1, help="seed of texts and weights (default 1)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    given = parser.parse_args()
    if given.steps < 1 or given.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    return given


if __name__ == "__main__":
    main()

"""Train the demo: a small STEM model that knows the world's countries, its facts in the tables.

The tables hold the facts because the token embedding learns ten times more slowly than the rest:
with one rate for all, the facts settle in the embedding and swapping table rows changes no answer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from demo_eval import accuracies, perplexities, swap_rate
from demo_facts import countries
from demo_model import DemoConfig, DemoModel, logits_with_int4, next_token_loss
from demo_text import Composer
from demo_tokenizer import DemoTokenizer
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

DOCUMENTS = 30_000
RANKS = 1500
BATCH_TOKENS = 2048
ROW_TOKENS = 128  # attention over longer rows costs a third more time
LEARNING_RATE = 4e-3
EMBEDDING_SPEED = 0.1  # times LEARNING_RATE
TABLE_SPEED = 2.0  # a row learns only when its token occurs
FINISH_SHARE = 0.2  # of the steps, at the end: int4 rounding, and rows as long as generation gets
SHARDS = 2


class Report(TypedDict):
    """report.json."""

    steps: int
    seed: int
    threads: int
    training_seconds: float
    heldout_accuracy: dict[str, float]  # share of right answers, by fact
    swap_names: int  # one-token country names that took part
    swap_rate: float
    heldout_perplexity: dict[str, float]  # by rounding of the weights


@dataclass(frozen=True)
class Options:
    out: Path
    steps: int
    seed: int
    threads: int


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    checkpoint = options.out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)

    composer = Composer(countries(), options.seed)
    documents = composer.training_documents(DOCUMENTS)
    heldout = composer.heldout_paragraphs()
    (options.out / "train.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    (options.out / "heldout.txt").write_text("\n".join(heldout) + "\n", encoding="utf-8")
    tokenizer = DemoTokenizer(documents, RANKS)
    model = DemoModel(DemoConfig(tokenizer.vocab_size))

    started = time.monotonic()
    train(model, tokenizer.documents(documents), options)
    seconds = time.monotonic() - started
    tokenizer.save_ranks(checkpoint / "tokenizer.model")
    save_checkpoint(model, checkpoint, options.seed)

    swap_names, swapped = swap_rate(model, tokenizer, options.seed)
    report: Report = {
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "training_seconds": round(seconds, 1),
        "heldout_accuracy": accuracies(model, tokenizer, composer.prompts()),
        "swap_names": swap_names,
        "swap_rate": swapped,
        "heldout_perplexity": perplexities(model, tokenizer.documents(heldout)),
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(report, options.out)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="Train the demo model and write it in the public STEM trainer's layout. "
        "It learns facts about countries from plain sentences; every fact is tested in a "
        "sentence form that was kept out of its training.",
        epilog="OUT receives checkpoint/ (give it to `stem-edge export`), train.txt, heldout.txt "
        "(text of the kept-out sentences, for perplexity) and report.json (what the model knows). "
        "The same seed, steps and threads give the same model.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, made if missing")
    parser.add_argument(
        "--steps",
        type=int,
        default=1200,
        help=f"training steps of {BATCH_TOKENS} tokens (default 1200, some 4 minutes)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use (default 2)")
    given = parser.parse_args()
    if given.steps < 1 or given.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"{given.out} is a file; OUT must be a folder")
    return Options(given.out, given.steps, given.seed, given.threads)


def packed(documents: list[list[int]], length: int) -> Tensor:
    """All documents end to end, cut into rows [N, length]; the rest of the last row is dropped."""
    stream = torch.tensor([token for document in documents for token in document])
    return stream[: len(stream) // length * length].view(-1, length)


def train(model: DemoModel, documents: list[list[int]], options: Options) -> None:
    """Fit `model` to `documents`, at the end as it will run: long rows, int4 layers."""
    optimizer = make_optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    short, long = (
        batches(packed(documents, length), options.seed)
        for length in (ROW_TOKENS, model.config.max_seqlen)
    )
    started = time.monotonic()
    for step in range(options.steps):
        done = step / options.steps
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(done)
        if done < 1 - FINISH_SHARE:
            tokens = next(short)
            loss = next_token_loss(model(tokens), tokens)
        else:
            tokens = next(long)
            loss = next_token_loss(logits_with_int4(model, tokens), tokens)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        show_progress(step + 1, options.steps, loss.item(), time.monotonic() - started)


def make_optimizer(model: DemoModel) -> torch.optim.Optimizer:
    slow = [model.tok_embeddings.weight]
    tables = model.tables()
    apart = {id(p) for p in slow + tables}
    rest = [p for p in model.parameters() if id(p) not in apart]
    return torch.optim.AdamW(
        [
            {"params": slow, "lr": LEARNING_RATE * EMBEDDING_SPEED, "weight_decay": 0.0},
            {"params": tables, "lr": LEARNING_RATE * TABLE_SPEED, "weight_decay": 0.0},
            {"params": rest, "lr": LEARNING_RATE, "weight_decay": 0.05},
        ],
        betas=(0.9, 0.98),
    )


def schedule(done: float) -> float:
    """Share of the peak learning rate: a short warm-up, then half a cosine to nothing."""
    return min(1.0, 0.02 + done / 0.04) * 0.5 * (1 + math.cos(math.pi * done))


def batches(rows: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches [BATCH_TOKENS / T, T] without end, each pass over rows [N, T] in a new order."""
    generator = torch.Generator().manual_seed(seed)
    size = BATCH_TOKENS // rows.shape[1]
    while True:
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[ids] for ids in torch.split(order, size) if len(ids) == size)


def show_progress(step: int, steps: int, loss: float, seconds: float) -> None:
    if sys.stderr.isatty():
        left = int(seconds / step * (steps - step))
        end = "\n" if step == steps else ""
        line = f"\rstep {step}/{steps}  loss {loss:.3f}  {left // 60}:{left % 60:02} left  "
        print(line, end=end, file=sys.stderr, flush=True)


def save_checkpoint(model: DemoModel, folder: Path, seed: int) -> None:
    """The trainer's training layout: params.json, the backbone, the tables as column shards."""
    state = model.state_dict()
    tables = {name: w for name, w in state.items() if name.startswith("stem_embeddings.")}
    backbone = {name: w for name, w in state.items() if name not in tables}
    with warnings.catch_warnings():  # one process is what we mean
        warnings.filterwarnings("ignore", "torch.distributed is")
        save_distributed({"model": backbone}, checkpoint_id=folder, no_dist=True)
    (folder / "stem_shards").mkdir(exist_ok=True)
    for shard in range(SHARDS):
        columns = {name: w.chunk(SHARDS, dim=1)[shard].clone() for name, w in tables.items()}
        torch.save(columns, folder / "stem_shards" / f"stem_model_mp{shard}.pt")
    sizes = asdict(model.config) | {"stem_embedding_dim": model.config.stem_embedding_dim}
    params = {
        "name": "countries",
        "seed": seed,
        "distributed": {"model_dtype": "fp32", "stem_parallel_size": SHARDS},
        "model": sizes | {"weight_tying": False},
        "data": {
            "tokenizer": {"name": "tiktoken", "path": "tokenizer.model"},
            "add_bos": True,
            "add_eos": True,
        },
    }
    (folder / "params.json").write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")


def print_report(report: Report, out: Path) -> None:
    print(f"trained in {report['training_seconds']} s; of the facts in held-out forms it knows")
    for fact, share in report["heldout_accuracy"].items():
        print(f"  {fact:<12}{share:7.1%}")
    print(f"swapped table rows change {report['swap_rate']:.1%} of capitals")
    print("perplexity of held-out text")
    for name, value in report["heldout_perplexity"].items():
        print(f"  {name:<24}{value:8.4f}")
    print(f"checkpoint: {out / 'checkpoint'}")
    print(f"next: stem-edge export {out / 'checkpoint'} BUNDLE")


if __name__ == "__main__":
    main()

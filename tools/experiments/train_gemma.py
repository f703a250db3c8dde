"""Train a small Gemma 4 on texts, with every part that E2B and E4B have, to see what 4 bits cost.

    python tools/experiments/train_gemma.py OUT --text FILE... --minutes 40

OUT receives checkpoint/ (for `stem-edge export` and `stem-edge eval`), train.txt and heldout.txt.
It needs torch and transformers. Weights are never rounded in training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "demo"))
from demo_corpus import read_corpus
from demo_tokenizer import DemoTokenizer
from demo_training import Budget, batches, packed, progress, schedule, shares_done

RANKS = 1536
ROW_TOKENS, BATCH_TOKENS = 128, 2048
LEARNING_RATE = 2e-3
# E2B in small: sliding and full layers with heads of their own, half of the layers borrow K and V
# and have a wider FFN, a third of the parameters are rows.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "num_kv_shared_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 64,
    "sliding_window": 128,
    "max_position_embeddings": 2048,
    "final_logit_softcapping": 30.0,
    "attention_dropout": 0.0,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=40.0)
    args = parser.parse_args()
    torch.manual_seed(1)
    corpus = read_corpus(args.text)
    tokenizer = DemoTokenizer(corpus.training, RANKS)
    model = make_model(tokenizer.vocab_size)
    train(model, tokenizer.documents(corpus.training), args.minutes * 60)
    folder = args.out / "checkpoint"
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    for name, documents in (("train", corpus.training), ("heldout", corpus.heldout)):
        (args.out / f"{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def make_model(vocab_size: int) -> Any:
    """Make a model of random weights whose scores are flat, so that it learns from the start."""
    config = transformers.Gemma4TextConfig(
        vocab_size=vocab_size, vocab_size_per_layer_input=vocab_size, **SHAPE
    )
    model = transformers.Gemma4ForCausalLM(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        torch.nn.init.constant_(attention.q_norm.weight, attention.head_dim**-0.5)
    return model


def train(model: Any, documents: list[list[int]], seconds: float) -> None:
    """Fit the model to documents for some time."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), fused=True)
    rows = batches(packed(documents, ROW_TOKENS), BATCH_TOKENS, seed=1)
    with progress() as bar:
        for step, done in enumerate(shares_done(Budget(0, seconds))):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * schedule(done)
            ids = next(rows)
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_description_str(f"step {step}  loss {loss.item():.3f}", refresh=False)
            bar.update(done - bar.n)


def save_tokenizer(tokenizer: DemoTokenizer, path: Path) -> None:
    """Write tokenizer.json, with special tokens where the model has them."""
    saved = Tokenizer.from_str(tokenizer.bpe.to_str())
    saved.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    saved.save(str(path))


if __name__ == "__main__":
    main()

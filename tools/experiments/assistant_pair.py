"""Train a small Gemma 4 and its assistant on a text, and print how often drafts are right, by their place.

    python tools/experiments/assistant_pair.py TEXT --out FOLDER --steps 400

The last tenth of the text is kept from training, and drafted. FOLDER gets the bundle, and how many drafts were
right after each token, as tools/bench/bench_assistant.py takes it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from all_borrowed import sharing_all
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy

import stem_edge
from stem_edge.runtime.backends.onnxruntime.assistant import AssistedBackend

VOCAB, LENGTH, BATCH, UNROLLED, MOST = 1024, 128, 8, 4, 7
# Prompts that are answered, tokens of each, and of an answer: few, because a small model soon repeats itself.
PROMPTS, PROMPT, NEW = 200, 64, 24
BOTH: dict[str, Any] = {
    "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 64, "sliding_window": 64, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TARGET = BOTH | {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
DRAFTER = BOTH | {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip


def make_assistant() -> Any:
    """Make an assistant that scores every token."""
    with sharing_all():
        config = transformers.Gemma4AssistantConfig(
            text_config=transformers.Gemma4TextConfig(**DRAFTER),
            backbone_hidden_size=TARGET["hidden_size"],
        )
        config._attn_implementation = "eager"
        return transformers.Gemma4AssistantForCausalLM(config)


def train(model: Any, steps: int, loss_of: Callable[[Any], Any], ids: Any, rate: float) -> None:
    """Train on random pieces of a text."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH, 1))
        loss = loss_of(ids[starts + torch.arange(LENGTH)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.3f} nats", flush=True)


def distilled(target: Any, assistant: Any, ids: Any) -> Any:
    """Return the loss of drafts at all places of texts [B, T], each over the keys before it."""
    with torch.no_grad():
        found = target(ids, output_hidden_states=True, return_shared_kv_states=True)
        embedded = target.get_input_embeddings()(ids)
    places = torch.arange(1, LENGTH - UNROLLED)
    back = places[:, None] - 1 - torch.arange(LENGTH)[None]
    window = BOTH["sliding_window"]
    masks = {
        name: torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        for name, seen in (
            ("full_attention", back >= 0),
            ("sliding_attention", (back >= 0) & (back <= window)),
        )
    }
    state, losses = found.hidden_states[-1][:, places - 1], []
    for further in range(UNROLLED):
        both = torch.cat([embedded[:, places + further], state], -1)
        last = assistant.model(
            inputs_embeds=assistant.pre_projection(both),
            attention_mask=masks,
            position_ids=places[None],
            shared_kv_states=found.shared_kv_states,
            use_cache=False,
            output_hidden_states=True,  # otherwise transformers cuts what is not there
        ).last_hidden_state
        state, scores = assistant.post_projection(last), assistant.lm_head(last)
        wanted = found.logits[:, places + further].softmax(-1)
        losses.append(cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1)))
    return torch.stack(losses).mean()


def recorded(bundle: Path, prompts: Sequence[list[int]], tokens: int) -> list[Any]:
    """Return answers without guesses, each with the drafts before each of its tokens."""
    answers = []
    with stem_edge.load(bundle, threads=1, speculate=True, trial=False) as model:
        engine, backend = model.engine, model.engine.backend
        model.speculate(None)
        if not isinstance(backend, AssistedBackend):
            raise TypeError("the assistant was not loaded")
        for prompt in prompts:
            chunks = model.generate(prompt, max_new_tokens=tokens)
            answer = [token for chunk in chunks for token in chunk.token_ids]
            context = engine.open_context(len(prompt) + len(answer) + 1)
            for _ in engine.process(context, prompt):
                pass
            drafter, drafts = backend.open_drafter(context.backend), list[list[int]]()
            for token in answer:
                drafts.append(drafter.draft(token, context.position, MOST))
                engine.step(context, np.array([token]))
            answers.append((prompt, answer, drafts))
    return answers


def right_drafts(answers: list[Any]) -> list[list[int]]:
    """Return how many drafts after each token of each answer are right, while all drafts can be judged."""
    found = list[list[int]]()
    for _, text, drafts in answers:
        judged = zip(drafts, range(1, len(text) - MOST), strict=False)
        right = [np.equal(made, text[at : at + MOST]) for made, at in judged]
        found.append([int(same.cumprod().sum()) for same in right])
    return found


def speeds(bundle: Path, prompts: Sequence[list[int]], tokens: int) -> tuple[float, float]:
    """Return tokens a second of decoding without and with guesses."""
    spent: tuple[list[float], list[float]] = [], []
    with stem_edge.load(bundle, threads=1, speculate=True, trial=False) as model:
        own = model.stepping.speculation
        for prompt in prompts:
            for times, guessing in zip(spent, (None, own), strict=True):
                model.speculate(guessing)
                model.generate_text(prompt, max_new_tokens=tokens)
                times.append(model.stats.decode_seconds)
        model.speculate(own)
    return tuple(len(prompts) * (tokens - 1) / sum(times) for times in spent)  # type: ignore[return-value]


def train_pair(text: str, folder: Path, steps: int) -> list[list[int]]:
    """Train on all but the last tenth of a text, export to folder / "bundle"; return prompts of the rest."""
    kept = len(text) * 9 // 10
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text[:kept]], VOCAB, special_tokens=["<end>"])
    ids, judged = (torch.tensor(tokenizer.encode(t).ids) for t in (text[:kept], text[kept:]))
    config = transformers.Gemma4TextConfig(**TARGET)
    config._attn_implementation = "eager"
    target, assistant = transformers.Gemma4ForCausalLM(config), make_assistant()
    train(target, steps, lambda ids: target(ids, labels=ids).loss, ids, 3e-3)
    train(assistant, steps, lambda ids: distilled(target, assistant, ids), ids, 3e-3)
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    given: dict[str, Any] = {"backbone": "fp32", "tables": "fp32"}
    given |= {"assistant": folder / "assistant", "force": True}
    stem_edge.export_bundle(folder / "target", folder / "bundle", **given)
    starts = range(0, len(judged) - PROMPT, max(PROMPT, len(judged) // PROMPTS))
    return [judged[at : at + PROMPT].tolist() for at in starts]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="file of text")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=400, help="of either training (400)")
    args = parser.parse_args()
    torch.manual_seed(0)
    prompts = train_pair(args.text.read_text("utf-8"), args.out, args.steps)
    right = right_drafts(recorded(args.out / "bundle", prompts, NEW))
    (args.out / "right.json").write_text(json.dumps(right))
    each = np.concatenate([np.array(one) for one in right])
    shares = " ".join(f"{(each > place).mean():.2f}" for place in range(MOST))
    print("right, with all before it, by place:", shares)
    plain, guessed = speeds(args.out / "bundle", prompts, NEW)
    print(f"the small pair decodes {plain:.0f} tok/s without guesses, {guessed:.0f} with")


if __name__ == "__main__":
    main()

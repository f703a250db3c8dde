"""Train a small Gemma 4 and its assistant on a text, and print how often drafts are right, by their place.

    python tools/experiments/assistant_pair.py TEXT --steps 600
    python tools/experiments/assistant_pair.py TEXT --seconds 0.1 --draft 0.004 --times 2=1.15,4=1.4,8=2.1

Then prints tokens in the time of a plain step where a model with these costs (of `stem-edge prepare`) had
these drafts: chosen by the gate as in `generate`, and with drafts that are all wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from all_borrowed import sharing_all
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy

import stem_edge
from stem_edge.runtime.backends.onnxruntime.assistant import AssistedBackend
from stem_edge.runtime.speculation.drafts import ByPlace
from stem_edge.runtime.speculation.gate import Gate
from stem_edge.runtime.speculation.speculation import GatedGuesses
from stem_edge.runtime.speculation.text_drafts import TextDrafts

VOCAB, LENGTH, BATCH, UNROLLED, MOST = 1024, 128, 16, 4, 7
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


class Replayed(ByPlace):
    """Drafts as they were recorded; or such as are never right."""

    def __init__(self, answer: Any, seconds: float, *, wrong: bool) -> None:
        super().__init__()
        self.seconds, self._answer, self._wrong = seconds, answer, wrong

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return the drafts after a text."""
        prompt, _, drafts = self._answer
        found = drafts[len(seen) - len(prompt) - 1][:count]
        return [-1] * len(found) if self._wrong else found


def speed(answers: list[Any], times: dict[int, float], each: float, *, wrong: bool) -> float:
    """Return tokens in the time of a plain step, with the gate of `generate`."""
    tokens = spent = 0.0
    for answer in answers:
        prompt, text, _ = answer
        source = Replayed(answer, each, wrong=wrong)
        guesses = GatedGuesses(Gate(times, MOST), [TextDrafts(), source], 1.0)
        place = 1
        while place < len(text):
            drafts = guesses.after([*prompt, *text[:place]], MOST)
            size = next((n for n in sorted(times) if n > len(drafts)), 1)
            spent += (times[size] if drafts else 1.0) + each * len(drafts)
            pairs = zip(drafts, text[place:], strict=False)
            right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafts))
            place, tokens = place + right + 1, tokens + right + 1
    return tokens / spent


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="file of text")
    parser.add_argument("--steps", type=int, default=600, help="of either training")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a step of one token")
    parser.add_argument("--draft", type=float, default=0.004, help="seconds of a draft")
    parser.add_argument("--times", default="2=1.15,4=1.4,8=2.1", help="of larger steps beside that")
    args = parser.parse_args()
    torch.manual_seed(0)
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train(str(args.text), VOCAB, special_tokens=["<end>"])
        ids = torch.tensor(tokenizer.encode(args.text.read_text("utf-8")).ids)
        kept = len(ids) * 9 // 10
        config = transformers.Gemma4TextConfig(**TARGET)
        config._attn_implementation = "eager"
        target, assistant = transformers.Gemma4ForCausalLM(config), make_assistant()
        train(target, args.steps, lambda ids: target(ids, labels=ids).loss, ids[:kept], 3e-3)
        train(
            assistant, args.steps, lambda ids: distilled(target, assistant, ids), ids[:kept], 3e-3
        )
        target.save_pretrained(folder / "t")
        assistant.save_pretrained(folder / "a")
        tokenizer.save(str(folder / "t" / "tokenizer.json"))
        given: dict[str, Any] = {"backbone": "fp32", "tables": "fp32", "assistant": folder / "a"}
        stem_edge.export_bundle(folder / "t", folder / "b", **given)
        starts = range(kept, len(ids) - 64, max(64, (len(ids) - kept) // 50))
        answers = recorded(folder / "b", [ids[at : at + 64].tolist() for at in starts], 96)
    right = np.zeros(MOST)
    for _, text, drafts in answers:
        for place, made in enumerate(drafts):
            same = np.array(made[: len(text) - place - 1]) == text[place + 1 : place + 1 + MOST]
            right[: len(same)] += np.cumprod(same)
    total = sum(len(text) for _, text, _ in answers)
    print("right, with all before it, by place:", " ".join(f"{n / total:.2f}" for n in right))
    times = {1: 1.0} | {int(n): float(t) for n, t in (p.split("=") for p in args.times.split(","))}
    for what, wrong in (("drafts of this pair", False), ("drafts that are all wrong", True)):
        found = speed(answers, times, args.draft / args.seconds, wrong=wrong)
        print(f"{what}: {found:.2f} times as fast as without")


if __name__ == "__main__":
    main()

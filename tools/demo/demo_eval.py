"""Measure what the demo model knows."""

from __future__ import annotations

from demo_facts import FACTS
from demo_model import DemoModel, greedy
from demo_text import Prompt, is_right
from demo_tokenizer import DemoTokenizer

ANSWER_TOKENS = 24  # enough for three neighbours, the longest answer


def accuracies(
    model: DemoModel, tokenizer: DemoTokenizer, prompts: list[Prompt]
) -> dict[str, float]:
    """Return fact -> share of right greedy answers to the held-out prompts of this fact."""
    answers = greedy(model, [tokenizer.prompt(p.text) for p in prompts], ANSWER_TOKENS)
    right: dict[str, list[bool]] = {fact: [] for fact in FACTS}
    for prompt, answer in zip(prompts, answers, strict=True):
        right[prompt.fact].append(is_right(prompt, tokenizer.decode(answer)))
    return {fact: round(sum(marks) / len(marks), 4) for fact, marks in right.items()}

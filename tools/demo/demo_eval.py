"""Measure what the demo model knows, where it stores it, and what rounding its weights costs."""

from __future__ import annotations

import copy
import math
import random

import torch
from demo_facts import FACTS, countries
from demo_model import DemoModel, greedy, int4_linears, int8, next_token_loss
from demo_text import Prompt, is_right
from demo_tokenizer import DemoTokenizer
from torch import Tensor
from torch.func import functional_call

ANSWER_TOKENS = 24  # enough for three neighbours, the longest answer
TABLES = "stem_embeddings"


def accuracies(
    model: DemoModel, tokenizer: DemoTokenizer, prompts: list[Prompt]
) -> dict[str, float]:
    """Share of right greedy answers to the held-out prompts of each fact."""
    answers = greedy(model, [tokenizer.prompt(p.text) for p in prompts], ANSWER_TOKENS)
    right: dict[str, list[bool]] = {fact: [] for fact in FACTS}
    for prompt, answer in zip(prompts, answers, strict=True):
        right[prompt.fact].append(is_right(prompt, tokenizer.decode(answer)))
    return {fact: round(sum(marks) / len(marks), 4) for fact, marks in right.items()}


def swap_rate(model: DemoModel, tokenizer: DemoTokenizer, seed: int) -> tuple[int, float]:
    """Swap table rows between countries, and count how often the capital follows.

    Every one-token name gets the rows of another; the token embedding stays. Returns the number of
    names and the share of answers that are the other country's capital.
    """
    token_of = {}
    for country in countries():
        tokens = tokenizer.encode(" " + country.name.removeprefix("the "))
        if len(tokens) == 1:
            token_of[country] = tokens[0]
    takers = random.Random(seed).sample(list(token_of), len(token_of))
    flips = 0
    for taker, giver in zip(takers, takers[1:] + takers[:1], strict=True):
        swapped = with_rows_of(model, token_of[taker], token_of[giver])
        prompt = tokenizer.prompt(f"The capital of {taker.name} is")
        answer = tokenizer.decode(greedy(swapped, [prompt], ANSWER_TOKENS)[0])
        flips += is_right(Prompt(giver, "capital", ""), answer)
    return len(takers), round(flips / len(takers), 4)


@torch.no_grad()
def with_rows_of(model: DemoModel, taker: int, giver: int) -> DemoModel:
    """Copy `model`, with the table rows of token `giver` in place of those of `taker`."""
    swapped = copy.deepcopy(model)
    for table in swapped.tables():
        table[taker] = table[giver]
    return swapped


@torch.no_grad()
def perplexities(model: DemoModel, documents: list[list[int]]) -> dict[str, float]:
    """Perplexity of the held-out documents, as trained and as rounded in a bundle."""
    rest = int8(model, TABLES, "tok_embeddings", "output")
    rounding: dict[str, dict[str, Tensor]] = {
        "fp32": {},
        "int8_tables": int8(model, TABLES),
        "int4_layers_int8_rest": int4_linears(model) | rest,
    }
    return {name: round(perplexity(model, w, documents), 5) for name, w in rounding.items()}


def perplexity(model: DemoModel, weights: dict[str, Tensor], documents: list[list[int]]) -> float:
    """exp of the mean loss per token, with `weights` in place of the model's own."""
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.tensor([document])
        logits = functional_call(model, weights, (tokens,))
        total += next_token_loss(logits, tokens, reduction="sum").item()
        count += len(document) - 1
    return math.exp(total / count)

"""Batches and speculation of stem-edge, as callers of generate and generate_many meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from stem_edge.measuring.bench.following import Following
from stem_edge.measuring.bench.together import Guessed, Text, Together

if TYPE_CHECKING:
    from stem_edge.runtime import Model


def decode_together(model: Model, texts: list[Text], count: int) -> Together:
    """Run `count` sequences, and one that joins them, as stem_edge.measuring.bench.together says."""
    model.forget_prefixes()  # so that no prompt is computed before
    run = Together(count, model.engine.rows.counters, step_costs(model))
    params = [_following(text, _note(run, number)) for number, text in enumerate(texts)]
    prompts = [text.prompt for text in texts]
    if count == 1:
        with _speculating(model, False):
            for _ in model.generate(prompts[0], params[0]):
                pass
        return run
    with closing(model.generate_many(prompts, params, sequences=count)) as chunks:
        for _, chunk in chunks:
            if chunk.error is not None:
                raise chunk.error
            if run.joined:
                break
    return run


def decode_guessing(model: Model, text: Text, drafts: int) -> Guessed:
    """Decode an answer, with the guesses that the model was loaded for, or without any."""
    own: list[int] = []
    with _speculating(model, bool(drafts)):
        for _ in model.generate(text.prompt, _following(text, lambda _, best: own.append(best))):
            pass
    stats = model.stats
    return Guessed(
        stats.decode_seconds, stats.drafted_tokens, stats.accepted_tokens, own, step_costs(model)
    )


def step_costs(model: Model) -> dict[int, float]:
    """Return the time of steps of several tokens over that of one, if it was measured."""
    _, costs, speculation = model.stepping
    costs = costs if speculation is None else speculation.costs
    times = costs.times if costs is not None and (speculation or costs.sure) else {}
    return {tokens: cost for tokens, cost in times.items() if tokens > 1}


@contextmanager
def _speculating(model: Model, on: bool) -> Iterator[None]:
    """Let a model speculate as it was loaded to, or not."""
    loaded = model.stepping
    try:
        model.stepping = loaded if on else loaded._replace(speculation=None)
        yield
    finally:
        model.stepping = loaded


def _note(run: Together, sequence: int) -> Callable[[int, int], None]:
    return lambda token, own: run.chosen(sequence, token)


def _following(text: Text, chosen: Callable[[int, int], None]) -> Following:
    whole = (*text.prompt, *text.answer)
    return Following(max_new_tokens=len(text.answer), text=whole, chosen=chosen)

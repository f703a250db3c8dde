"""stem-edge itself as a subject: fed with tokens of a real text, or following one in its own loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import stem_edge
from stem_edge.graph.names import PREFILL
from stem_edge.measuring.bench.together import FollowedText, Guessed, Together
from stem_edge.measuring.bench.worker import MeasuredEngine
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.sampling import Sampler, sampler_of
from stem_edge.runtime.sampling_params import SamplingParams


class StemEdge(MeasuredEngine):
    """A loaded bundle. Its own tokens could repeat the same few rows, so it is fed with given ones."""

    def __init__(self, bundle: str, context: int, threads: int, **options: Any) -> None:
        self._model = stem_edge.load(bundle, context_length=context, threads=threads, **options)
        self._engine, self._length, self._options = self._model.engine, context, options
        self._context = self._engine.open_context(1)
        # What the first prompt opens counts as loading, so that prompts are timed alone.
        if (loaded := getattr(self._engine.backend, "loaded", None)) is not None:
            loaded.later.find(PREFILL)

    def clear(self) -> None:
        self._context = self._engine.open_context(self._length)

    def choose(self, token_ids: list[int]) -> int:
        """Process a prompt in chunks, or a single token as generating does."""
        if len(token_ids) == 1:
            ids = np.array(token_ids)
            self._engine.expect(ids)
            return int(self._engine.step(self._context, ids, top=1)[0].argmax())
        best = -1
        for logits in self._engine.process(self._context, token_ids, top=1):
            best = int(logits[0].argmax())
        return best

    def together(self, texts: list[FollowedText], count: int) -> Together:
        return decode_together(self._model, texts, count)

    def guess(self, text: FollowedText, drafts: int) -> Guessed:
        return decode_guessing(self._model, text, drafts)

    def counters(self) -> dict[str, float]:
        """Return the counters of the rows, and the sizes of plan and caches in bytes."""
        plan, rows = self._model.plan, self._engine.rows
        cache = getattr(rows, "cache", None)
        filled, slot_nbytes = (0, 0) if cache is None else (cache.filled, cache.slot_nbytes)
        found = {
            **vars(rows.counters()),
            "planned": plan.total,
            "slots": plan.slots,
            "chunk_tokens": plan.chunk_tokens,
            "filled_slots": filled,
            "row_cache_nbytes": filled * slot_nbytes,
            "kv_nbytes": self._context.backend.nbytes,
        }
        if plan.device is not None:
            loaded = getattr(self._engine.backend, "loaded", None)  # portable graphs have none
            found |= {
                "device_planned": plan.device.total,
                "device_row_cache_planned": plan.device.row_cache,
                "device_allocated": 0 if loaded is None else loaded.memory.nbytes,
            }
        return found

    def about(self) -> dict[str, str]:
        device, providers = self._model.plan.device, self._options.get("providers")
        if device is None and providers is None:
            return {}
        from stem_edge.runtime.backends.onnxruntime.providers.about import about_accelerator

        found = about_accelerator(providers, self._options.get("provider_libraries"))
        if device is not None:
            found["variant"] = str(device.variant)
        elif found["provider"] != "cpu":
            found["variant"] = "portable"  # it has no device plan, because its memory is the host's
        return found


@dataclass(frozen=True)
class Following(SamplingParams):
    """Options of an answer that is known: greedy decoding, with the tokens of `text`.

    text: prompt and answer, with at least max_new_tokens tokens after the prompt. chosen: called
    when a token is taken, with it and the one that the model would have taken.
    """

    temperature: float | None = 0.0  # so that nothing of the model's own changes what is measured
    text: tuple[int, ...] = ()
    chosen: Callable[[int, int], None] = lambda token, own: None


class Follower(Sampler):
    """Computes each token, and takes the text's instead."""

    def __init__(self, params: Following) -> None:
        super().__init__(params)
        self._text, self._chosen = params.text, params.chosen

    def __call__(self, logits: F32, seen: Sequence[int]) -> int:
        own, token = super().__call__(logits, seen), self._text[len(seen)]
        self._chosen(token, own)
        return token


@sampler_of.register
def _(params: Following, prompt: int = 0) -> Sampler:
    return Follower(params)


def decode_together(model: Model, texts: list[FollowedText], count: int) -> Together:
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


def decode_guessing(model: Model, text: FollowedText, drafts: int) -> Guessed:
    """Decode an answer, with the guesses that the model was loaded for, or without any."""
    own: list[int] = []
    with _speculating(model, bool(drafts)):
        for _ in model.generate(text.prompt, _following(text, lambda _, best: own.append(best))):
            pass
    stats = model.stats
    counts = stats.decode_seconds, stats.drafted_tokens, stats.accepted_tokens
    return Guessed(*counts, own, step_costs(model))


def step_costs(model: Model) -> dict[int, float]:
    """Return the time of steps of several tokens over that of one, if it was measured."""
    _, costs, speculation = model.stepping
    costs = costs if speculation is None else speculation.costs
    times = costs.times if costs is not None and (speculation or costs.sure) else {}
    return {tokens: cost for tokens, cost in times.items() if tokens > 1}


@contextmanager
def _speculating(model: Model, on: bool) -> Iterator[None]:
    """Let a model speculate as it was loaded to, or not."""
    loaded = model.stepping.speculation
    try:
        model.speculate(loaded if on else None)
        yield
    finally:
        model.speculate(loaded)


def _note(run: Together, sequence: int) -> Callable[[int, int], None]:
    return lambda token, own: run.chosen(sequence, token)


def _following(text: FollowedText, chosen: Callable[[int, int], None]) -> Following:
    whole = (*text.prompt, *text.answer)
    return Following(max_new_tokens=len(text.answer), text=whole, chosen=chosen)

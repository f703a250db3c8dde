"""Comparison of the next token without edits, with the targets' words, and with edits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.edit_files.file import Edit, NewRows
from stem_edge.edit_files.folder import as_edit
from stem_edge.editing.explain import text_of_token
from stem_edge.errors import InputError
from stem_edge.measuring.quality.logit_source import bundle_logits
from stem_edge.numerics.distributions import kullback_leibler, log_softmax
from stem_edge.numerics.quantize import F64
from stem_edge.runtime import Model, load
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.lookups.spans import AbsentError, find_spans, text_of
from stem_edge.runtime.text.codec import TextCodec

TOP = 4  # as in figure 7 of the STEM paper
CONTINUED = 8  # tokens of the continuation, because a single one is often only part of a word


@dataclass(frozen=True)
class NextToken:
    """Candidate for the next token, with its probability."""

    token_id: int
    text: str | None  # None: part of a character
    probability: float


@dataclass(frozen=True)
class Outcome:
    """Most probable next tokens after a prompt, and its continuation."""

    prompt: str
    top: tuple[NextToken, ...]  # the most probable first
    text: str  # continuation of CONTINUED tokens, greedy


@dataclass(frozen=True)
class Comparison:
    """Outcomes of a prompt without edits, with the targets' words in it, and with edits.

    Divergences are Kullback-Leibler, in nats, between distributions over the next token:
    edited_from_target, KL(target || edited), is 0 if the edit has the effect of the other words;
    original_from_target, KL(target || original), is the distance before the edit;
    edited_from_original, KL(original || edited), is the change by the edit. The first two are None
    without a target prompt.
    """

    bundle: str
    engine: str
    original: Outcome
    target: Outcome | None  # prompt with targets for sources; None if it has no source
    edited: Outcome  # of the original prompt
    edited_from_target: float | None
    original_from_target: float | None
    edited_from_original: float

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcomes by name. Without a target prompt, its outcome is left out."""
        target = {} if self.target is None else {"target prompt": self.target}
        return {"original": self.original} | target | {"edited": self.edited}


def compare_edits(
    model: Model | str | Path,
    prompt: str,
    edits: Edit | str | Path | Sequence[Edit | str | Path],
    *,
    top: int = TOP,
    **options: Unpack[LoadKeywords],
) -> Comparison:
    """Compare the next token after a prompt with edits, without, and with the targets' words in it.

    model: a loaded model (its active edits, Model.edited, hold in all three cases), or a bundle to
    load with `options` of stem_edge.load.
    edits: one or several, as Model.edited takes them.
    top: number of tokens to list.

    Raises InputError, EditError, and what stem_edge.load raises.
    """
    wanted = [edits] if isinstance(edits, Edit | str | Path) else list(edits)
    if not isinstance(prompt, str) or not prompt or not wanted:
        raise InputError("a comparison needs a prompt, as text, and at least one edit")
    if isinstance(model, Model):
        if options:
            raise InputError(f"{', '.join(options)}: for loading, but this model is already loaded")
        return _compare(model, prompt, wanted, top)
    with load(model, **options) as loaded:
        return _compare(loaded, prompt, wanted, top)


def _compare(
    model: Model, prompt: str, wanted: Sequence[Edit | str | Path], top: int
) -> Comparison:
    edits = [as_edit(model.bundle, each) for each in wanted]
    vocabulary = model.config.vocab_size
    if not 1 <= top <= vocabulary:
        raise InputError(f"top is {top}; expected 1 to {vocabulary} tokens")
    codec = TextCodec(model.bundle.file(TOKENIZER))
    with model.edited(*edits):  # first, because it can be refused
        edited, edited_log = _outcome(model, codec, prompt, top)
    original, original_log = _outcome(model, codec, prompt, top)
    words = target_prompt(codec, prompt, edits)
    target, target_log = (None, None) if words is None else _outcome(model, codec, words, top)
    return Comparison(
        bundle=str(model.bundle.path),
        engine=model.plan.engine,
        original=original,
        target=target,
        edited=edited,
        edited_from_target=_divergence(target_log, edited_log),
        original_from_target=_divergence(target_log, original_log),
        edited_from_original=float(kullback_leibler(original_log, edited_log)),
    )


def target_prompt(codec: TextCodec, prompt: str, edits: Sequence[Edit]) -> str | None:
    """Return the prompt with targets in place of sources; None if no source occurs in it.

    Replacements follow the rules for stacked edits: a target is never replaced again, and where
    sources overlap, the later edit wins.
    """
    ids = codec.encode(prompt, add_special_tokens=False)
    text, starts, _ = text_of(codec, ids)
    pieces: list[tuple[int, int, str]] = []  # begin, end, replacement
    for edit in reversed(edits):
        change = edit.change
        if isinstance(change, NewRows):
            continue
        spans = []
        with suppress(AbsentError):
            spans = find_spans(codec, ids, change.source)
        for span in spans:
            begin = starts[span.start] + len(span.before)
            end = begin + len(change.source)
            if all(end <= other[0] or other[1] <= begin for other in pieces):
                pieces.append((begin, end, change.target))
    for begin, end, words in sorted(pieces, reverse=True):
        text = text[:begin] + words + text[end:]
    return text if pieces else None


def _outcome(model: Model, codec: TextCodec, prompt: str, top: int) -> tuple[Outcome, F64]:
    """Return the outcome of a prompt, and log probabilities [V] of the next token."""
    ids = model.tokenize(prompt)
    (last,) = bundle_logits(model, ids, len(ids) - 1)
    found: F64 = log_softmax(last)[0]
    best = np.argsort(-found, kind="stable")[:top].tolist()
    tokens = [NextToken(each, text_of_token(codec, each), math.exp(found[each])) for each in best]
    text = model.generate_text(ids, max_new_tokens=CONTINUED, temperature=0)
    return Outcome(prompt, tuple(tokens), text), found


def _divergence(target: F64 | None, other: F64) -> float | None:
    return None if target is None else float(kullback_leibler(target, other))

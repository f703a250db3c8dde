"""Quality of a bundle: perplexity on a text, divergence from a reference.

Divergence says more than perplexity, which can even improve by chance when a model is quantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Unpack

import numpy as np

from stem_edge.apps.measuring.quality.logit_source import open_reference, open_sources
from stem_edge.apps.measuring.quality.scores import Scores, make_task, read_text, score
from stem_edge.bundle.edit_files.file import Edit, open_edit
from stem_edge.bundle.hub.fetch import pinned
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F64
from stem_edge.progress import Progress
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import open_or_make


@dataclass(frozen=True)
class Divergence:
    """Comparison of next-token distributions: KL(reference || bundle) in nats, over all tokens."""

    reference: str
    reference_engine: str | None  # None for a checkpoint
    reference_perplexity: float
    mean: float
    percentile_99: float
    greatest: float
    agreement: float  # share of positions where both have the same most probable token


@dataclass(frozen=True)
class Quality:
    """How well a bundle predicts a text."""

    bundle: str
    documents: int
    tokens: int  # predicted and scored, each once
    nbytes: int  # of the documents, in UTF-8
    window: int  # tokens seen at once
    stride: int  # tokens between the starts of windows
    engine: str
    edits: int  # number of edits in effect
    ids_sha256: str  # of the token ids: perplexities over other tokens cannot be compared
    perplexity: float  # exp of the mean of -log P(token)
    bits_per_byte: float
    divergence: Divergence | None


def evaluate(
    bundle: str | Path,
    text: str | Path,
    *,
    lines: bool = False,
    window: int | None = None,
    against: str | Path | None = None,
    edits: Sequence[Edit | str | Path] = (),
    **options: Unpack[LoadKeywords],
) -> Quality:
    """Measure how well a bundle predicts a text: perplexity, bits per byte, divergence.

    text: file in UTF-8 to predict.
    lines: each line that is not blank is a document with an empty context, and ends with the
        end-of-text token. By default, the text is one document. Documents begin with the
        begin-of-text token if the model was trained with it.
    window: tokens seen at once. Windows overlap by half. Default: the model's context, up to 2048.
    against: reference to compare distributions with: a bundle, or a checkpoint that can be exported.
        numpy computes a checkpoint in float32, which is slow: each window reads the backbone again.
    edits: edits of the bundle with scope everywhere, or their files, to see their side effects. `against`
        gets no edits.
    options: options of stem_edge.load, for the bundle; `against` runs on the CPU with defaults. memory
        limits both together; logits, and the arrays of a checkpoint's window, need memory in addition.

    Raises InputError for a text of fewer than two tokens, a window out of range, or a reference with
    another vocabulary or tokenizer; BundleError, CheckpointError, MemoryPlanError, BackendError.
    """
    bundle, against = pinned(bundle), None if against is None else pinned(against)
    opened = open_or_make(bundle)
    opened_edits = [open_edit(opened, edit) for edit in edits]
    if any(edit.scope != "everywhere" for edit in opened_edits):
        raise InputError(
            "an edit at positions belongs to a prompt; give edits of scope everywhere only"
        )
    task = make_task(opened, read_text(Path(text)), lines=lines, window=window)
    reference = None if against is None else open_reference(against, opened, task)
    chosen = LoadOptions(**options | {"context_length": task.window})
    title = f"scoring {bundle}"
    with Progress(task.nbytes, title, options.get("progress")) as bar, ExitStack() as stack:
        engines, sources = open_sources(stack, bundle, chosen, reference, opened_edits)
        per_token = task.nbytes / task.predicted
        scores, nats = score(task, sources, lambda tokens: bar.advance(tokens * per_token))
    likelihood = float(scores[0].likelihood.mean())
    divergence = None
    if against is not None:
        divergence = _divergence(str(against), engines[1], scores, nats)
    bits = -likelihood * task.predicted / math.log(2)
    return Quality(
        bundle=str(bundle),
        documents=len(task.token_ids),
        tokens=task.predicted,
        nbytes=task.nbytes,
        window=task.window,
        stride=task.stride,
        engine=str(engines[0]),
        edits=len(edits),
        ids_sha256=sha256(repr(task.token_ids).encode()).hexdigest(),
        perplexity=math.exp(-likelihood),
        bits_per_byte=bits / task.nbytes,
        divergence=divergence,
    )


def _divergence(
    reference: str,
    engine: str | None,
    scores: list[Scores],
    nats: F64,
) -> Divergence:
    found, expected = scores
    return Divergence(
        reference=reference,
        reference_engine=engine,
        reference_perplexity=math.exp(-expected.likelihood.mean()),
        mean=float(nats.mean()),
        percentile_99=float(np.percentile(nats, 99)),
        greatest=float(nats.max()),
        agreement=float((found.top == expected.top).mean()),
    )

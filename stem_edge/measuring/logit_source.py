"""Where logits come from: a loaded bundle, or a checkpoint through the plain reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.bundle import Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError, InputError
from stem_edge.measuring.models import is_bundle, open_checkpoint
from stem_edge.measuring.scores import LogitSource, Task, split
from stem_edge.quantize import F32
from stem_edge.reference import head_forward, hidden_states
from stem_edge.runtime import Model, load
from stem_edge.runtime.machine import own_memory
from stem_edge.runtime.options import EngineChoice
from stem_edge.units import parse_size

if TYPE_CHECKING:
    from stem_edge.export.checkpoint import Checkpoint

# Logits of the reference model at a time: its head is read anew for each such piece.
PIECE_NBYTES = 128 << 20


class BundleLogits:
    """A loaded bundle as a LogitSource."""

    def __init__(self, model: Model) -> None:
        self._model, self.engine = model, model.plan.engine

    def logits(self, token_ids: list[int], first: int) -> Iterator[F32]:
        """Compute logits in pieces. Raises BundleError for logits that are no numbers."""
        for piece in self._model.logits_chunks(token_ids):
            if not np.isfinite(piece).all():
                raise BundleError(
                    f"{self._model.bundle.path}: computes NaN or infinite logits; check it with "
                    "stem-edge verify, or export again with --backbone fp32 --tables fp32 to see "
                    "whether quantization is the cause"
                )
            if first < len(piece):
                yield piece[first:]
            first = max(0, first - len(piece))


class CheckpointLogits:
    """A checkpoint as a LogitSource: the reference model in float32, as the exporter's probe.

    Of the tables only the rows of a window's tokens are read; the backbone is read once a window.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint

    def logits(self, token_ids: list[int], first: int) -> Iterator[F32]:
        """Compute logits in pieces. Raises CheckpointError for logits that are no numbers."""
        from stem_edge.export.checkpoint import check_finite

        config, backbone = self._source.config, self._source.backbone
        hidden = hidden_states(config, backbone, self._source.rows, token_ids)
        step = max(1, PIECE_NBYTES // (4 * config.vocab_size))
        for at in range(first, len(hidden), step):
            logits = head_forward(config, backbone, hidden[at : at + step])
            yield check_finite(f"{self._source.path}: logits", at, logits)


def open_reference(
    stack: ExitStack,
    path: Path,
    bundle: Bundle,
    task: Task,
    memory: int | str | None,
    threads: int | None,
    progress: bool | None,
    engine: EngineChoice = "auto",
) -> tuple[LogitSource, int | str | None]:
    """The reference, open until the stack closes, and what it leaves of `memory`.

    Raises InputError when its distributions cannot be compared with those of the bundle.
    """
    if not is_bundle(path):
        checkpoint = open_checkpoint(path)
        _check_vocabulary(path, checkpoint.config, bundle)
        return CheckpointLogits(checkpoint), memory
    other = open_bundle(path)
    _check_vocabulary(path, other.manifest.model, bundle)
    context = other.manifest.model.max_context
    if task.window > context:
        raise InputError(f"window is {task.window} tokens; {path} takes 1 to {context}")
    if split(other, task.text, lines=task.lines) != task.documents:
        raise InputError(
            f"{path}: its tokenizer gives other ids for this text than that of {bundle.path}; "
            "compare bundles of one model"
        )
    limit = None if memory is None else parse_size(memory)
    model = load(
        path,
        None if limit is None else limit // 2,
        threads,
        context_length=task.window,
        engine=engine,
        prefill_graph=False,
        warm_start=False,
        progress=progress,
    )
    stack.enter_context(model)
    if limit is not None:
        limit -= max(0, model.plan.total - own_memory())  # what it will take yet
    return BundleLogits(model), limit


def _check_vocabulary(path: Path, reference: ModelConfig, bundle: Bundle) -> None:
    found, expected = reference.vocab_size, bundle.manifest.model.vocab_size
    if found != expected:
        raise InputError(
            f"{path}: has {found:,} tokens, {bundle.path} has {expected:,}; distributions can be "
            "compared over one vocabulary only"
        )

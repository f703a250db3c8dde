"""Sources of logits: a loaded bundle, or a checkpoint computed by the float32 reference model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.apps.measuring.quality.scores import Logits, ScoringTask, split
from stem_edge.bundle.edit_files.file import Edit
from stem_edge.bundle.hub.names import hub_name
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.on_hub import NoBundleError
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import BundleError, InputError
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import Tokens, embed, head_forward, layer_forward
from stem_edge.runtime import Model
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.shown import parse_size
from stem_edge.system.memory import own_memory

if TYPE_CHECKING:
    from stem_edge.export.checkpoints.checkpoint import Checkpoint

# Size of a piece of the reference model's logits; each piece reads the weights of the head again.
PIECE_NBYTES = 128 << 20


def open_sources(
    stack: ExitStack,
    bundle: str | Path,
    options: LoadOptions,
    reference: Bundle | Checkpoint | None,
    edits: Sequence[Edit],
) -> tuple[list[str | None], list[Logits]]:
    """Load a bundle and its reference, if any; return engines, and functions that yield logits.

    The engine of a checkpoint is None. stack: closes the models. options: for loading the bundle; a
    reference bundle gets half of the memory. edits: knowledge edits of the bundle only. Both models
    compute prompts with the graph for decoding, not for prefill. Raises what stem_edge.load raises.
    """
    engines, references = list[str | None](), list[Logits]()
    if isinstance(reference, Bundle):
        limit = None if options.memory is None else parse_size(options.memory)
        usual = LoadOptions(
            memory=limit and limit // 2,
            threads=options.threads,
            context_length=options.context_length,
            progress=options.progress,
        )
        other = stack.enter_context(load_with(reference.path, usual))
        # The plan of the bundle counts the memory that this process has now. So subtract only the
        # memory that the reference has planned but not yet allocated.
        taken = max(0, other.plan.total - own_memory())
        options = replace(options, memory=limit and limit - taken)
        engines, references = [other.plan.engine], [partial(bundle_logits, other)]
    elif reference is not None:
        engines, references = [None], [partial(checkpoint_logits, reference)]
    model = stack.enter_context(load_with(bundle, options))
    stack.enter_context(model.edited(*edits))
    return [model.plan.engine, *engines], [partial(bundle_logits, model), *references]


def bundle_logits(model: Model, token_ids: list[int], first: int) -> Iterator[F32]:
    """Yield a bundle's logits [n, V] from position `first` on. Raises BundleError for NaN, inf."""
    model.engine.uses_prefill = False
    for piece in model.logits_chunks(token_ids):
        if not np.isfinite(piece).all():
            raise BundleError(
                f"{model.bundle.path}: computes NaN or infinite logits; check it with "
                "stem-edge verify, or export again with --type fp32 --rows fp32 to see "
                "whether quantization is the cause"
            )
        if first < len(piece):
            yield piece[first:]
        first = max(0, first - len(piece))


def checkpoint_logits(source: Checkpoint, token_ids: list[int], first: int) -> Iterator[F32]:
    """Yield a checkpoint's logits [n, V] from position `first` on, by the float32 reference model.

    Each call reads the whole backbone, but only the table rows of its tokens. Raises CheckpointError
    for NaN and infinity.
    """
    from stem_edge.export.checkpoints.checkpoint import check_finite

    config, backbone = source.config, source.backbone
    tokens, hidden = Tokens(config, backbone, token_ids), embed(config, backbone, token_ids)
    for layer in range(config.n_layers):
        hidden = layer_forward(config, layer, backbone, source.rows, hidden, tokens)
    step = max(1, PIECE_NBYTES // (4 * config.vocab_size))
    for at in range(first, len(hidden), step):
        logits = head_forward(config, backbone, hidden[at : at + step])
        yield check_finite(f"{source.path}: logits", at, logits)


def open_reference(path: str | Path, bundle: Bundle, task: ScoringTask) -> Bundle | Checkpoint:
    """Open the bundle or checkpoint to compare `bundle` with; download a path like hf:org/name.

    Raises InputError if both cannot be compared on the task's text; HubError, BundleError, CheckpointError.
    """
    reference = _open(path)
    found = reference.manifest.model if isinstance(reference, Bundle) else reference.config
    vocab_size = bundle.manifest.model.vocab_size
    if found.vocab_size != vocab_size:
        raise InputError(
            f"{reference.path}: has {found.vocab_size:,} tokens, {bundle.path} has {vocab_size:,}; "
            "distributions can only be compared over one vocabulary"
        )
    if not isinstance(reference, Bundle):
        return reference
    if task.window > found.max_context:
        raise InputError(
            f"window is {task.window} tokens; {reference.path} takes 1 to {found.max_context}"
        )
    if [ids for _, ids in split(reference, task.text, lines=task.lines)] != task.token_ids:
        raise InputError(
            f"{reference.path}: its tokenizer gives other ids for this text than that of {bundle.path}; "
            "compare bundles of one model"
        )
    return reference


def _open(path: str | Path) -> Bundle | Checkpoint:
    try:
        if hub_name(path) is not None or (Path(path) / MANIFEST).is_file():
            return open_bundle(path)
    except NoBundleError as error:
        from stem_edge.export.checkpoints.fetched import checkpoint_folder

        path = checkpoint_folder(str(error.found))
    if not Path(path).exists():
        raise InputError(f"{path}: no such folder; give a bundle, or the folder of a checkpoint")
    from stem_edge.export.checkpoints.readers import read_checkpoint

    return read_checkpoint(Path(path))

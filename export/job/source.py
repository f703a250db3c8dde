"""Source of an export: a checkpoint, an adapter merged into it, and its tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer
from stem_edge.system.memory import return_freed_memory

NO_END = "the tokenizer has no end-of-text token: generation ends at -n tokens or a --stop text"


def read_source(
    checkpoint: str | Path, options: ExportOptions
) -> tuple[Checkpoint, ExportedTokenizer]:
    """Open the checkpoint, with the adapter that the options name, and its tokenizer."""
    source = read_checkpoint(checkpoint, options.ignore_keys)
    if options.lora is not None:
        source = merge_lora(source, options.lora)
    return source, _convert(source, options.tokenizer)


def _convert(source: Checkpoint, override: str | Path | None) -> ExportedTokenizer:
    wanted = source.tokenizer
    if override is not None:
        wanted = TokenizerSource("json", Path(override), wanted.add_bos)
    return_freed_memory()  # else lists of a large vocabulary stay with this process
    converted = convert_tokenizer(wanted.kind, wanted.path, add_bos=wanted.add_bos)
    return_freed_memory()
    if converted.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{wanted.path or wanted.kind}: the tokenizer has {converted.vocab_size} ids, but the "
            f"model only {source.config.vocab_size}; give the model's own with --tokenizer "
            "tokenizer.json"
        )
    return converted


def with_special_tokens(source: Checkpoint, converted: ExportedTokenizer) -> Checkpoint:
    """Return the checkpoint with the ids of its tokenizer's special tokens, and its notes."""
    config = msgspec.structs.replace(
        source.config, bos_id=converted.bos_id, eos_ids=converted.eos_ids
    )
    missing = () if converted.eos_ids else (NO_END,)
    return replace(source, config=config, notes=source.notes + converted.notes + missing)

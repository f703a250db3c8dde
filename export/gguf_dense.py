"""A dense checkpoint as one ordinary GGUF file, which llama.cpp runs without this project.

What is in it, and which models it can be made of: gguf_llama.py.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from stem_edge.bundle import WORKING
from stem_edge.errors import ExportError
from stem_edge.export.calibration import read_token_ids, sequences
from stem_edge.export.exporter import tokenizer_of
from stem_edge.export.files import Working, explained, locked, take_place
from stem_edge.export.gguf_llama import architecture_of, write_dense
from stem_edge.export.gguf_tokenizer import differences, tokenizer_metadata
from stem_edge.export.gguf_writer import MAGIC
from stem_edge.export.importance import importance_vectors
from stem_edge.export.lora import merge_lora
from stem_edge.export.options import CALIBRATION_TOKENS, UNWEIGHTED
from stem_edge.export.readers import read_checkpoint
from stem_edge.export.sources import Sources, check_apart
from stem_edge.export.space import check_free
from stem_edge.footprint import gguf_footprint
from stem_edge.formats import GGUF_TYPES, GgufFormat, GgufType
from stem_edge.ggml_check import checked_ggml
from stem_edge.progress import Progress
from stem_edge.quantize import F32


class TokenizerDiffers(UserWarning):
    """llama.cpp does not read text exactly as the model's tokenizer does."""


def export_dense_gguf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    backbone: GgufType = "q4_k_m",
    calibration: str | Path | None = None,
    calibration_tokens: int | None = None,
    lora: str | Path | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Export a dense checkpoint (stem_edge.export.readers says of whom) to the GGUF file `out`.

    backbone: llama.cpp's mixture of tensor types: "q4_k_m", "q5_k_m", "q6_k", "q8_0", "q4_0", "f16"
        or "f32".
    calibration: a text, or token ids as .npy or .int32, of the kind that the model will see: its
        channels count by their size when matrices are quantized (what others call an imatrix).
    calibration_tokens: how many of its tokens, at most. Default: 16384.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    force: replace an existing GGUF file; it stays whole until the new one is.
    progress: show a progress bar on stderr. Default: if that is a terminal.

    Returns `out`. Warns (TokenizerDiffers) where llama.cpp will not give the tokenizer's own ids.
    Raises CheckpointError, ExportError, BackendError; then `out` is what it was.
    """
    _check(backbone, calibration, calibration_tokens, threads)
    out = Path(out)
    check_apart(out, [checkpoint, lora])
    sources = Sources([checkpoint, lora, tokenizer, calibration])
    with publish_file(out, force=force) as part:
        ggml = checked_ggml()  # before gigabytes are read
        source = read_checkpoint(checkpoint)
        if lora is not None:
            source = merge_lora(source, Path(lora))
        architecture_of(source)
        converted = tokenizer_of(source, tokenizer)
        config = source.config
        check_free(out, gguf_footprint(config, GgufFormat(weights=backbone), None).backbone_nbytes)
        values = tokenizer_metadata(converted, config.vocab_size)
        path = None if calibration is None else Path(calibration)
        ids = read_token_ids(path, converted, config.vocab_size)
        with Progress(4 * config.backbone_parameters, "exporting", progress) as bar:
            vectors: dict[str, F32] = {}
            if len(ids):
                texts = sequences(ids, calibration_tokens or CALIBRATION_TOKENS, config.max_context)
                vectors = importance_vectors(source, texts, bar.describe)
                bar.describe("exporting")
            write_dense(
                part,
                ggml,
                source,
                backbone,
                values,
                importance=vectors,
                threads=threads or os.cpu_count() or 1,
                advance=bar.advance,
            )
        sources.check([source.path, lora, tokenizer, calibration], [out, part])
    for sentence in differences(converted):
        warnings.warn(TokenizerDiffers(f"{out}: {sentence}"), stacklevel=2)
    return out


def _check(
    backbone: str, calibration: object, calibration_tokens: int | None, threads: int | None
) -> None:
    if backbone not in GGUF_TYPES:
        raise ExportError(f"backbone is {backbone!r}; expected one of {', '.join(GGUF_TYPES)}")
    if calibration is not None and backbone in UNWEIGHTED:
        raise ExportError(
            f"a calibration text guides quantizers of few bits, and {backbone} needs none; leave it "
            "out, or take backbone q4_k_m"
        )
    if calibration is None and calibration_tokens is not None:
        raise ExportError(
            "calibration_tokens counts tokens of a calibration text, and there is none; give one"
        )
    for name, count in (("threads", threads), ("calibration_tokens", calibration_tokens)):
        if count is not None and count < 1:
            raise ExportError(f"{name} is {count}; expected at least 1")


@contextlib.contextmanager
def publish_file(out: Path, *, force: bool) -> Iterator[Path]:
    """Yields a path beside `out` that takes its name when the block ends without an error, and is
    removed otherwise. Whoever writes there fsyncs.

    Raises ExportError when `out` exists and `force` is not set, when it is something other than a
    GGUF file, when another export to it is under way, or when it cannot be written.
    """
    _check_target(out, force)
    part, keep = out.with_name(WORKING + out.name), False
    with locked(out, "file"), explained(out, Working(part), "export again"):
        part.unlink(missing_ok=True)  # of an export that was killed
        try:
            yield part
            keep = True  # from here on it may be the old file
            take_place(part, out)
        finally:
            if not keep:
                part.unlink(missing_ok=True)


def _check_target(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportError(f"{out}: exists already; choose another file or replace it with --force")
    with contextlib.suppress(OSError), out.open("rb") as file:
        if out.is_file() and not out.is_symlink() and file.read(len(MAGIC)) == MAGIC:
            return
    raise ExportError(
        f"{out}: exists and is not a GGUF file; choose another: --force replaces only those"
    )

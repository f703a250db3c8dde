"""Export of a dense checkpoint to one ordinary GGUF file, which llama.cpp runs by itself.

backbone/gguf_llama.py says which models it can be made of, and what is in it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from stem_edge.bundle.absent import WORKING
from stem_edge.bundle.footprint import gguf_footprint
from stem_edge.errors import ExportError
from stem_edge.export.backbone.gguf import importance_by_text
from stem_edge.export.backbone.gguf_llama import architecture_of, write_dense
from stem_edge.export.backbone.gguf_tokenizer import differences, tokenizer_metadata
from stem_edge.export.backbone.gguf_writer import MAGIC
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.sources import Sources, check_apart
from stem_edge.export.job.job import begin_layers
from stem_edge.export.job.options import UNWEIGHTED, ExportOptions
from stem_edge.export.job.publish import (
    Working,
    check_free,
    check_target,
    explained,
    locked,
    take_place,
)
from stem_edge.export.job.source import read_source
from stem_edge.export.quantization.calibration import read_token_ids
from stem_edge.files import disk
from stem_edge.ggml.check import checked_ggml
from stem_edge.graph.formats import GgufFormat, GgufType
from stem_edge.progress import Progress


class TokenizerDiffers(UserWarning):
    """Text is not read by llama.cpp exactly as by the model's tokenizer."""


def export_dense_gguf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    backbone: GgufType = "q4_k_m",
    calibration: str | Path | None = None,
    calibration_tokens: int | None = None,
    lora: str | Path | None = None,
    tokenizer: str | Path | None = None,
    ignore_keys: Collection[str] = (),
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Export a dense checkpoint of any known trainer (checkpoints/readers.py) to the GGUF file `out`.

    backbone: llama.cpp's mixture of tensor types: "q4_k_m", "q5_k_m", "q6_k", "q8_0", "q4_0", "f16"
        or "f32".
    calibration: a text, or token ids as .npy or .int32, like those that the model will see: it
        weights the channels of the matrices when they are quantized (llama.cpp's imatrix).
    calibration_tokens: how many of its tokens, at most. Default: 16384.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    ignore_keys: keys of config.json that you know to change nothing, though transformers knows them.
    force: replace an existing GGUF file; it stays whole until the new one is.
    progress: show a progress bar on stderr. Default: if that is a terminal; else a line every 10 seconds.

    Returns `out`. Warns (TokenizerDiffers) where llama.cpp will not give the tokenizer's own ids.
    Raises CheckpointError, ExportError, BackendError; `out` is then unchanged.
    """
    given = {name: value for name, value in locals().items() if name not in ("checkpoint", "out")}
    options, out = ExportOptions(engine="gguf", **given), Path(out)
    if calibration is not None and backbone in UNWEIGHTED:
        raise ExportError(
            f"a calibration text guides quantizers of few bits, but {backbone} needs none; leave it "
            "out, or take backbone q4_k_m"
        )
    checkpoint = checkpoint_folder(checkpoint, progress)
    check_apart(out, [checkpoint, lora])
    sources = Sources([checkpoint, *options.files])
    with publish_file(out, force=force) as part:
        ggml = checked_ggml()  # before gigabytes are read, since it may not be installed
        source, converted = read_source(checkpoint, options)
        architecture_of(source)
        config = source.config
        check_free(out, gguf_footprint(config, GgufFormat(weights=backbone), None).backbone_nbytes)
        values = tokenizer_metadata(converted, config.vocab_size)
        ids = read_token_ids(calibration, converted, config.vocab_size)
        with Progress(0, "exporting", progress) as bar:
            importance = importance_by_text(source, ids, options, bar)
            begin_layers(bar, "writing weights", config)
            write_dense(
                part,
                ggml,
                source,
                backbone,
                values,
                importance=importance,
                threads=options.cpus,
                advance=bar.advance,
            )
        sources.check([source.path, *options.files], [out, part])
    for sentence in differences(converted):
        warnings.warn(TokenizerDiffers(f"{out}: {sentence}"), stacklevel=2)
    return out


@contextlib.contextmanager
def publish_file(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a path beside `out`, and rename it to `out` when the block ends without an error.

    After an error, remove it. The block must fsync what it writes there. Raises ExportError when
    `out` exists and `force` is not set, when it is no GGUF file, when another export to it is
    running, or when it cannot be written.
    """
    check_target(out, force, "file", "a GGUF file", _is_gguf)
    part, keep = out.with_name(WORKING + out.name), False
    with locked(out, "file"), explained(out, Working(part), "export again"):
        part.unlink(missing_ok=True)  # left by an export that was killed
        try:
            yield part
            keep = True  # must not be deleted: from here on it may be the old file
            take_place(part, out)
        finally:
            if not keep:
                part.unlink(missing_ok=True)


def _is_gguf(path: Path) -> bool:
    try:
        return path.is_file() and disk.read_file(path, len(MAGIC)).startswith(MAGIC)
    except OSError:  # unreadable, so it must not be replaced
        return False

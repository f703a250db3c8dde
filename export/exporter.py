"""Export of a checkpoint to a bundle: read, convert, write, compare, publish."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from stem_edge.bundle.manifest import (
    MANIFEST,
    TABLES,
    TOKEN_COUNTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    encode_manifest,
)
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.export.backbone.assistant import AssistantPart, assistant_part
from stem_edge.export.backbone.forms import FORMS
from stem_edge.export.backbone.onnx import PREFILL_STEP
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.sources import Sources, check_apart
from stem_edge.export.job.files import write_file
from stem_edge.export.job.job import (
    Advance,
    Job,
    WriteStep,
    begin_layers,
    make_job,
)
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.publish import LOCK, check_free, publish
from stem_edge.export.job.source import read_source, with_special_tokens
from stem_edge.export.job.steps import Steps
from stem_edge.export.job.storage import Storage
from stem_edge.export.job.stored_types import keep_stored_types
from stem_edge.export.job.table_plan import ExportRows
from stem_edge.export.job.trained_grid import keep_trained_grid
from stem_edge.export.quality_check import accept
from stem_edge.export.quantization.calibration import (
    judged_ids,
    observe,
    read_token_ids,
)
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tables import TableWriter
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.quantize import F32
from stem_edge.progress import Progress
from stem_edge.system.memory import give_back_freed_blocks, return_freed_memory
from stem_edge.tables.token_counts import encode_counts

# Of freed pieces of matrices, by each thread; with less, an export takes longer.
KEPT_NBYTES = 4 << 20
# Steps that walk through the layers -> what they do, for the bar.
LAYERED = {"backbone": "writing weights", PREFILL_STEP: "writing weights for prompts"}


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    engine: EngineName = "onnxruntime",
    type: str | None = None,
    rows: ExportRows | None = None,
    lora: str | Path | None = None,
    assistant: str | Path | None = None,
    tokenizer: str | Path | None = None,
    ignore_keys: Collection[str] = (),
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    prefill_graph: bool | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint of any known trainer (checkpoints/readers.py) to a bundle in `out`.

    The first sentence of each keyword, and its default, are also the help of the command.

    engine: what runs the bundle: "onnxruntime", or "ggml", the kernels of llama.cpp. Default:
        onnxruntime.
    type: how the backbone's matrices are stored. "balanced" and "small" have 4 bits where they cost
        least, and 8 elsewhere: that is measured, matrix by matrix, on the calibration text.
        "near-lossless" has 8 bits everywhere; "keep" has the types of a quantized checkpoint. Or one
        type for all: with onnxruntime "int4", "int8" or "fp32"; with ggml one of llama.cpp's mixtures:
        "q4_k_m" (balanced), "q4_0" (small), "q5_k_m", "q6_k", "q8_0" (near-lossless), "f16" or
        "f32". Default: keep if the checkpoint is quantized, else balanced.
    rows: type of the rows on flash: "int8", "int4", "fp16" or "fp32", or "mixed": int8 for the
        twentieth of the tokens that the calibration text uses most, int4 for the other tokens.
        Default: int8, or the codes that the checkpoint has.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    assistant: folder, or GGUF file, of the draft model that was made for a Gemma 4. It drafts on
        onnxruntime's CPU. It has the type of the backbone if that is one for all matrices, else 8
        bits; no token depends on it.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    ignore_keys: key of config.json that you know to change nothing, though transformers knows it;
        several of them.
    calibration: text, or token ids as .npy or .int32, like those that the model will see. It
        decides types, guides the quantizer, balances the channels of the prefill graph and warms
        the row cache; on ggml, it weights the channels of the quantized matrices by their size.
        Default: a mixed text of 50 kB, which warms nothing.
    max_kl: largest mean divergence from the checkpoint, in nats, on the last 512 tokens of the
        calibration text. If a graph diverges more, the export fails and leaves `out` as it was.
        Default: 0.5.
    prefill_graph: add int8 matrices for prompts, one byte for each parameter of the layers.
        Default: with a quantized backbone, if they are no less exact than it is.
    force: replace `out` if it is a bundle; it stays whole until the new one is.
    threads: threads that compute. Default: one for each CPU that this process may use.
    progress: show a progress bar on stderr. Default: if that is a terminal; else a line every 10 seconds.

    A killed export leaves a folder beside `out`, which the next one removes. Raises CheckpointError,
    ExportError (FarError for a bundle that is too far from the checkpoint) and, with engine "ggml",
    BackendError if ggml is not installed; `out` is then unchanged.
    """
    given = dict(locals())
    for name in ("checkpoint", "out"):
        del given[name]
    return export_with(checkpoint, Path(out), ExportOptions(**given))


def export_with(checkpoint: str | Path, out: Path, options: ExportOptions) -> Bundle:
    """Export a checkpoint as export_bundle does, with its keywords as one object."""
    give_back_freed_blocks(KEPT_NBYTES)
    checkpoint = checkpoint_folder(checkpoint, options.progress)
    if options.assistant is not None:
        options = replace(options, assistant=checkpoint_folder(options.assistant, options.progress))
    check_apart(out, [checkpoint, options.lora, options.assistant])
    sources = Sources([checkpoint, *options.files])
    form = FORMS[options.engine]
    library = form.library()  # before gigabytes are read, since it may not be installed
    source, converted = read_source(checkpoint, options)
    form.check(source)
    storage = keep_stored_types(source, options, form.stored)
    source = with_special_tokens(source, converted)
    source, storage = keep_trained_grid(source, options, storage)
    part = _assistant(source, options, storage)
    text_ids = np.array([source.config.bos_id or 0])  # for a step that shows that it runs
    if storage.judged(options):
        text_ids = read_token_ids(options.calibration, converted, source.config.vocab_size)
    with publish(out, force=options.force) as folder:
        job = make_job(folder, source, converted, options, storage, text_ids, library)
        job = replace(job, assistant=part)
        footprint = form.footprint(
            job.source.config, job.format, job.table_format, prefill=job.prefill
        )
        check_free(out, footprint.flash_nbytes)
        with Progress(0, "exporting", options.progress) as bar:
            _run(job, bar)
        own = [out, folder, folder.with_name(folder.name + LOCK)]
        sources.check([source.path, *options.files], own)
    return open_bundle(out)


def _assistant(
    source: Checkpoint, options: ExportOptions, storage: Storage
) -> AssistantPart | None:
    if options.assistant is None:
        return None
    return assistant_part(Path(options.assistant), source.config, storage)


def _run(job: Job, bar: Progress) -> None:
    """Run the steps, compare, and write the manifest."""
    steps = Steps(job.folder)
    ids, expected = judged_ids(job.text_ids, job.source.config.max_context), None
    peaks: dict[str, F32] = {}
    if job.judged:
        bar.begin("computing with the checkpoint")
        expected, peaks = observe(job.source, ids, FORMS[job.options.engine].texts_of_peaks(job))
    config = job.source.config
    for name, write in _steps(job, peaks, steps, bar):
        if name == "tables":
            bar.begin("writing tables", 4 * config.table_parameters)
        elif name in LAYERED:
            begin_layers(bar, LAYERED[name], config)
        steps.run(name, write, bar.advance)
    bar.begin("trying it" if expected is None else "comparing with the checkpoint")
    return_freed_memory()  # of the pieces, before the engine takes as much
    manifest = accept(job, steps, peaks, ids, expected)
    write_file(job.folder / MANIFEST, encode_manifest(manifest))


def _steps(
    job: Job, peaks: dict[str, F32], done: Steps, bar: Progress
) -> Iterator[tuple[str, WriteStep]]:
    """Yield the name and function of each step. peaks: as Form.steps takes them."""
    yield "tokenizer", partial(_write_tokenizer, job)
    form = FORMS[job.options.engine]
    steps = form.steps(job, peaks, done.files, bar)
    if not form.after_tables:
        yield from steps
    if job.tables is not None:
        root, cpus = job.folder / TABLES, job.options.cpus
        yield from TableWriter(root, job.tables, job.source.tables, cpus).steps()
    if form.after_tables:
        yield from steps
    if job.assistant is not None:
        yield "assistant", partial(job.assistant.write, job.folder, job.options.cpus)


def _write_tokenizer(job: Job, meter: ErrorMeter, advance: Advance) -> dict[Path, FileEntry]:
    config = msgspec.json.encode(job.converted.config, order="sorted")
    contents = {
        TOKENIZER: job.converted.json.encode(),
        TOKENIZER_CONFIG: msgspec.json.format(config, indent=1) + b"\n",
    }
    if job.options.calibration is not None:
        contents[TOKEN_COUNTS] = encode_counts(job.counts)
    paths = {job.folder / name: data for name, data in contents.items()}
    return {path: write_file(path, data) for path, data in paths.items()}

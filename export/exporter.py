"""Export of a checkpoint to a bundle: read, convert, write, compare, publish."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    check_kinds,
    make_job,
)
from stem_edge.export.job.options import ExportEngine, ExportOptions
from stem_edge.export.job.publish import LOCK, check_free, publish
from stem_edge.export.job.recipe import Quality
from stem_edge.export.job.source import read_source, with_special_tokens
from stem_edge.export.job.steps import Steps
from stem_edge.export.job.stored_types import keep_stored_types
from stem_edge.export.job.table_plan import ExportTables
from stem_edge.export.job.trained_grid import keep_trained_grid
from stem_edge.export.quality_check import TooFarError, accept
from stem_edge.export.quantization.calibration import (
    judged_ids,
    observe,
    read_token_ids,
)
from stem_edge.export.quantization.error_meter import ErrorMeter
from stem_edge.export.tables import TableWriter
from stem_edge.graph.formats import (
    GgufType,
    MatrixKind,
    QuantizerName,
    WeightType,
)
from stem_edge.numerics.quantize import F32
from stem_edge.progress import Progress, tell
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
    engine: ExportEngine | None = None,
    quality: Quality | None = None,
    size: int | str | None = None,
    backbone: WeightType | GgufType | None = None,
    tables: ExportTables | None = None,
    lora: str | Path | None = None,
    assistant: str | Path | None = None,
    tokenizer: str | Path | None = None,
    ignore_keys: Collection[str] = (),
    head: WeightType | None = None,
    bits: Mapping[MatrixKind, int] | None = None,
    block_size: int | None = None,
    asymmetric: bool | None = None,
    quantizer: QuantizerName | None = None,
    group_size: int | None = None,
    prefill_graph: bool | None = None,
    calibration: str | Path | None = None,
    calibration_tokens: int | None = None,
    max_kl: float | None = None,
    accept_far: bool = False,
    frequent: float | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint of any known trainer (checkpoints/readers.py) to a bundle in `out`.

    The first sentence of each keyword, and its default, are also the help of the command.

    engine: what runs the backbone: "onnx" for onnxruntime, or "gguf" for ggml. Default: what
        `backbone` is for, else onnx.
    quality: how close to the checkpoint: "balanced" and "small" have 4 bits where they cost
        least, and 8 elsewhere; "near-lossless" has 8 everywhere. What 4 bits cost is measured, matrix
        by matrix, on the calibration text. Default: balanced.
    size: instead of `quality`: what the backbone's weights may take, in bytes or like 700MB.
    backbone: instead of `quality`: the type of all matrices. With onnx "int4", "int8" or "fp32";
        with gguf one of llama.cpp's mixtures of types: "q4_k_m" (the default), "q4_0", "q5_k_m",
        "q6_k", "q8_0", "f16" or "f32"; a GGUF file keeps its own types without.
    tables: type of the rows on flash: "int8", "int4", "fp16" or "fp32", or "mixed": int8 for the
        tokens that the calibration text uses most, int4 for the others. Default: int8, or the codes
        that the checkpoint has.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    assistant: folder, or GGUF file, of the drafter that was made for a Gemma 4, which then guesses ahead on
        onnxruntime's CPU. It has the types that `backbone`, `head` and `bits` give, and 8 bits where types are measured;
        no token depends on them.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    ignore_keys: key of config.json that you know to change nothing, though transformers knows it;
        several of them.
    head: type of embedding and head. Default: that of `backbone`, or by `quality`.
    bits: 4, 8 or 32 bits for kinds of matrices that differ from `backbone` and `head`. Kinds are
        "embedding", "head", "qkv", "v" (the part of qkv that makes values), "wo", "gate", "up", "down";
        "project" with low-rank tables; "ple_context", "ple_gate" and "ple_out" with per-layer embeddings;
        "laurel_in", "laurel_out", "altup_in" and "altup_out" in Gemma 3n.
    block_size: values of the backbone that share a scale. Smaller blocks are more exact and
        larger. Weights that were trained for 4 bits have the blocks of their training
        . Default: 64, or 32 if all have 8 bits.
    asymmetric: give each block of the backbone a zero point, which takes half a byte with int4.
        Default: if there are matrices of 4 bits that were not trained for them.
    quantizer: how codes of 4 bits are found: "rtn" rounds to nearest, "gptq" lets later weights
        make up for the rounding of earlier ones, on the calibration text. Default: gptq.
    group_size: values of a row of the tables that share a scale. Default: 32 for int4, else 128.
    prefill_graph: add int8 matrices for prompts, one byte for each parameter of the layers.
        Default: with a quantized backbone, if they are no less exact than it is.
    calibration: text, or token ids as .npy or .int32, like those that the model will see: it
        decides types, guides the quantizer and warms the row cache. With gguf, it weights the channels of
        the quantized matrices by their size; it also balances the channels of the prefill graph.
        Default: a mixed text of 50 kB, which warms nothing.
    calibration_tokens: how many of its tokens, at most, guide the quantizer. Default: 16384.
    max_kl: fail, and leave `out` as it was, if the mean divergence from the checkpoint on the last 512
        tokens of the calibration text is greater, in nats, for the decoding graph or the prefill graph;
        types are chosen to stay below it unless `quality`, `size` or `backbone` says others. That takes
        up to three exports. Default: 0.5; types that were not chosen are then tried again with 8 bits.
    accept_far: keep a bundle that is far from its checkpoint, by more than 0.5 nats, too.
    frequent: share of the records that mixed tables keep at 8 bits: those that the calibration text
        uses most. Default: a twentieth.
    force: replace `out` if it is a bundle; it stays whole until the new one is.
    threads: threads that compute. Default: one for each CPU that this process may use.
    progress: show a progress bar on stderr. Default: if that is a terminal; else a line every 10 seconds.

    With onnx only: quality, size, head, bits, block_size, asymmetric, quantizer, prefill_graph.

    A killed export leaves a folder beside `out`, which the next one removes. Raises CheckpointError,
    ExportError (FarError for a bundle that is too far from the checkpoint) and, with engine "gguf",
    BackendError if ggml is not installed; `out` is then unchanged.
    """
    given = dict(locals())
    for name in ("checkpoint", "out"):
        del given[name]
    return export_with(checkpoint, Path(out), ExportOptions(**given))


def export_with(checkpoint: str | Path, out: Path, options: ExportOptions) -> Bundle:
    """Export a checkpoint as export_bundle does, with its keywords as one object."""
    missed: TooFarError | None = None
    while True:
        give_back_freed_blocks(KEPT_NBYTES)  # each time, because loading what was written sets less
        try:
            return _export(checkpoint, out, options, missed)
        except TooFarError as miss:
            if (closer := options.closer(miss.nats)) is None or miss is missed:
                raise
            missed, options = miss, closer


def _export(
    checkpoint: str | Path,
    out: Path,
    options: ExportOptions,
    missed: TooFarError | None,
) -> Bundle:
    checkpoint = checkpoint_folder(checkpoint, options.progress)
    if options.assistant is not None:
        options = replace(options, assistant=checkpoint_folder(options.assistant, options.progress))
    check_apart(out, [checkpoint, options.lora, options.assistant])
    sources = Sources([checkpoint, *options.files])
    form = FORMS[options.runs_on]
    library = form.library()  # before gigabytes are read, since it may not be installed
    source, converted = read_source(checkpoint, options)
    form.check(source)
    check_kinds(source, options.bits)
    options = keep_stored_types(source, options, form.stored)
    source, options = keep_trained_grid(with_special_tokens(source, converted), options)
    part = _assistant(source, options)
    text_ids = np.array([source.config.bos_id or 0])  # for a step that shows that it runs
    if options.judged:
        text_ids = read_token_ids(options.calibration, converted, source.config.vocab_size)
    with publish(out, force=options.force) as folder:
        job = make_job(folder, source, converted, options, text_ids, library)
        job = replace(job, assistant=part)
        if missed is not None:
            if job.format == missed.format:  # no matrix is left to get more bits
                raise missed
            what = f"{missed.nats:g} nats from the checkpoint; again, with more bits"
            tell(what, options.progress)
        own = [out, folder, folder.with_name(folder.name + LOCK)]
        footprint = form.footprint(
            job.source.config, job.format, job.table_format, prefill=options.prefill
        )
        check_free(out, footprint.flash_nbytes)
        with Progress(0, "exporting", options.progress) as bar:
            _run(job, bar)
        sources.check([source.path, *options.files], own)
    return open_bundle(out)


def _assistant(source: Checkpoint, options: ExportOptions) -> AssistantPart | None:
    if options.assistant is None:
        return None
    return assistant_part(Path(options.assistant), source.config, options)


def _run(job: Job, bar: Progress) -> None:
    """Run the steps, compare, and write the manifest."""
    steps = Steps(job.folder)
    ids, expected = judged_ids(job.text_ids, job.source.config.max_context), None
    peaks: dict[str, F32] = {}
    if job.options.judged:
        bar.begin("computing with the checkpoint")
        expected, peaks = observe(job.source, ids, FORMS[job.options.runs_on].texts_of_peaks(job))
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
    form = FORMS[job.options.runs_on]
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

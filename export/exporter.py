"""The order of an export: read, convert, write, compare, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.bundle import MANIFEST, Bundle, encode_manifest, open_bundle
from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export.acceptance import Acceptance
from stem_edge.export.adding import check_base, open_base
from stem_edge.export.calibration import observe, probe_ids, read_token_ids
from stem_edge.export.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.files import LOCK, publish, write_file
from stem_edge.export.gguf_values import import_gguf
from stem_edge.export.job import Job
from stem_edge.export.journal import Journal, subject
from stem_edge.export.lora import merge_lora
from stem_edge.export.options import ExportEngine, ExportOptions
from stem_edge.export.readers import read_checkpoint
from stem_edge.export.sources import Sources, check_apart
from stem_edge.export.space import check_space
from stem_edge.export.steps import all_steps
from stem_edge.export.table_plan import ExportTables, TablePlan, plan_tables
from stem_edge.export.tokenizer import ExportedTokenizer, convert_tokenizer
from stem_edge.footprint import kinds_of
from stem_edge.formats import GgufType, MatrixKind, QuantizerName, WeightType
from stem_edge.ggml import Ggml
from stem_edge.ggml_check import checked_ggml
from stem_edge.progress import Progress
from stem_edge.token_counts import count_tokens
from stem_edge.verdicts import keep_good

NO_END = "the tokenizer names no end of text: generation ends at -n tokens or a --stop text"


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    engine: ExportEngine = "onnx",
    backbone: WeightType | GgufType | None = None,
    tables: ExportTables | None = None,
    lora: str | Path | None = None,
    tokenizer: str | Path | None = None,
    head: WeightType | None = None,
    bits: Mapping[MatrixKind, int] | None = None,
    block_size: int | None = None,
    asymmetric: bool = False,
    quantizer: QuantizerName | None = None,
    group_size: int | None = None,
    prefill_graph: bool | None = None,
    calibration: str | Path | None = None,
    calibration_tokens: int | None = None,
    max_kl: float | None = None,
    frequent: float | None = None,
    add: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint (stem_edge.export.readers says of whom) to a bundle in the folder `out`.

    engine: what runs the backbone: "onnx" for onnxruntime, or "gguf" for ggml.
    backbone: of onnx, "int4" (the default), "int8" or "fp32" matrices in the layers; of gguf, one of
        llama.cpp's mixtures of types, for the whole backbone: "q4_k_m" (the default), "q4_0",
        "q5_k_m", "q6_k", "q8_0", "f16" or "f32".
    tables: "int8" (the default), "int4", "fp16" or "fp32" rows, or "mixed": int8 of the tokens that
        the calibration text uses most, int4 of the others.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    head: type of embedding and head. Default: as the backbone. Of onnx alone, as are bits,
        block_size, asymmetric, quantizer and prefill_graph.
    bits: bits (4, 8 or 32) of some kinds of matrices, where they differ from that: "embedding",
        "head", "qkv", "wo", "gate", "up", "down" and, of low-rank tables, "project".
    block_size, group_size: values that share a scale in the backbone and in the tables. Default:
        128, and 32 in int4 tables. Smaller blocks are more exact and slower.
    asymmetric: give each block of the backbone a zero point, half a byte more for a block of int4.
    quantizer: how the backbone's codes are found. "rtn": scales from the range of each block;
        "search": scales that lose least, where channels of the calibration text, if there is one,
        count by their size; "gptq": later weights make up for the rounding of earlier ones, which
        needs a calibration text. Default: "gptq" with such a text, else "search".
    prefill_graph: add int8 matrices for prompts, a byte a parameter of the layers. Default: with a
        quantized backbone, if they are no less exact than it is.
    calibration: a text, or token ids as .npy or .int32, of the kind that the model will see: it
        warms the row cache, balances the channels of the prefill graph, and guides the quantizer;
        of gguf, channels of the quantized matrices then count by their size.
    calibration_tokens: how many of its tokens, at most, guide the quantizer. Default: 16384.
    max_kl: fail if the mean divergence from the checkpoint, in nats, on a few tokens (the last of
        the calibration text) is greater: of what decodes, and of the prefill graph.
    frequent: share of the vocabulary that mixed tables keep at 8 bits. Default: a twentieth.
    add: put the backbone into the bundle that `out` is, beside that of the other engine, or in
        place of an older one; tables, tokenizer and counts stay as they are, and must be those of
        the checkpoint.
    force: replace an existing bundle; it stays whole until the new one is.
    progress: show a progress bar on stderr. Default: if that is a terminal.

    An export that was killed goes on where it stood when it is started again. Raises
    CheckpointError, ExportError, with engine "gguf" BackendError if ggml is not there, with add
    BundleError; then `out` is what it was.
    """
    options = ExportOptions(
        engine=engine,
        backbone=backbone,
        tables=tables,
        lora=lora,
        tokenizer=tokenizer,
        head=head,
        bits=bits or {},
        block_size=block_size,
        asymmetric=asymmetric,
        quantizer=quantizer,
        group_size=group_size,
        prefill_graph=prefill_graph,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        max_kl=max_kl,
        frequent=frequent,
        add=add,
        force=force,
        threads=threads,
        progress=progress,
    )
    return _export(checkpoint, Path(out), options)


def _export(checkpoint: str | Path, out: Path, options: ExportOptions) -> Bundle:
    lora, tokenizer, calibration = options.lora, options.tokenizer, options.calibration
    if options.add:
        check_base(out, force=options.force)
    check_apart(out, [checkpoint, lora])
    sources = Sources([checkpoint, lora, tokenizer, calibration])
    ggml = _library() if options.engine == "gguf" else None  # before gigabytes are read
    source = read_checkpoint(checkpoint)
    if lora is not None:
        source = merge_lora(source, Path(lora))
    _check_kinds(source, options.bits)
    converted = tokenizer_of(source, tokenizer)
    source = _with_special_tokens(source, converted)
    text_ids = read_token_ids(
        Path(calibration) if calibration else None, converted, source.config.vocab_size
    )
    files = [source.path, *([Path(lora)] if lora is not None else [])]
    with publish(out, force=options.force or options.add) as work:
        folder, base = work.folder, open_base(out, source, converted) if options.add else None
        job = _make_job(folder, source, converted, options, text_ids, base, ggml)
        own = [out, folder, folder.with_name(folder.name + LOCK)]
        journal = Journal(folder, subject(_described(job), files, own))
        work.needed_nbytes = check_space(out, job, journal)
        with Progress(job.total, "exporting", options.progress) as bar:
            _run(job, journal, bar)
        sources.check([*files, tokenizer, calibration], own)
    bundle = open_bundle(out)
    keep_good(bundle, options.runs_on)  # it has just run here, to be compared
    return bundle


def _library() -> Ggml:
    """What writes a GGUF file: ggml, and the package that judges it. Raises BackendError, ExportError."""
    import_gguf()
    return checked_ggml()


def _make_job(
    folder: Path,
    source: Checkpoint,
    converted: ExportedTokenizer,
    options: ExportOptions,
    text_ids: npt.NDArray[np.int64],
    base: Bundle | None,
    ggml: Ggml | None,
) -> Job:
    counts, plan = count_tokens(text_ids, source.config.vocab_size), None
    if (tables := options.stored_tables) is not None:
        plan = plan_tables(source, tables.kind, tables.group_size, tables.frequent, counts)
    elif base is not None and (format := base.manifest.table_format) is not None:
        plan = TablePlan(format)
    return Job(folder, source, converted, options, text_ids, counts, plan, base, ggml)


def _described(job: Job) -> tuple[object, ...]:
    """All that changes the bytes of the bundle, beside the checkpoint's files."""
    text_hash = hashlib.sha256(job.text_ids.tobytes()).hexdigest()
    base = encode_manifest(job.base.manifest) if job.base else None
    ggml = job.ggml.version if job.ggml else None
    return job.options.described(), job.converted, text_hash, base, ggml


def _run(job: Job, journal: Journal, bar: Progress) -> None:
    """All steps that are not done yet, and the manifest."""
    bar.advance(journal.progress)
    bar.describe("computing with the checkpoint")
    ids = probe_ids(job.text_ids, job.converted, job.source.config.max_context)
    expected, peaks = observe(job.source, ids)
    bar.describe("exporting")
    for name, work in all_steps(job, peaks, journal.files, bar.describe):
        journal.run(name, work, bar.advance)
    bar.describe("comparing with the checkpoint")
    manifest = Acceptance(job, journal, peaks).compare(ids, expected)
    write_file(job.folder / MANIFEST, encode_manifest(manifest))
    journal.close()


def _check_kinds(source: Checkpoint, bits: Mapping[MatrixKind, int]) -> None:
    known = kinds_of(source.config)
    if absent := sorted(bits.keys() - known):
        raise ExportError(
            f"{source.path}: has no matrix of the kind {absent[0]!r}, which bits names; expected "
            f"some of {', '.join(sorted(known))}"
        )


def tokenizer_of(source: Checkpoint, override: str | Path | None) -> ExportedTokenizer:
    wanted = source.tokenizer
    if override is not None:
        wanted = TokenizerSource("json", Path(override), wanted.add_bos)
    converted = convert_tokenizer(wanted.kind, wanted.path, add_bos=wanted.add_bos)
    if converted.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{wanted.path or wanted.kind}: the tokenizer has {converted.vocab_size} ids, the model "
            f"{source.config.vocab_size}; give the model's own with --tokenizer tokenizer.json"
        )
    return converted


def _with_special_tokens(source: Checkpoint, converted: ExportedTokenizer) -> Checkpoint:
    config = msgspec.structs.replace(
        source.config, bos_id=converted.bos_id, eos_ids=converted.eos_ids
    )
    missing = () if converted.eos_ids else (NO_END,)
    return replace(source, config=config, notes=source.notes + missing)

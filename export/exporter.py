"""Exports a checkpoint to a bundle: reads, quantizes, writes, compares and publishes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from stem_edge.bundle.footprint import Footprint, gguf_footprint, onnx_footprint
from stem_edge.bundle.manifest import (
    MANIFEST,
    TOKENIZER,
    TOKENIZER_CONFIG,
    encode_manifest,
)
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import CheckpointError
from stem_edge.export.backbone.assistant import open_assistant, write_assistant
from stem_edge.export.backbone.gguf import check_runnable, write_gguf_backbone
from stem_edge.export.backbone.onnx import onnx_nbytes, write_onnx
from stem_edge.export.checkpoints.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.files import Output, write_file
from stem_edge.export.job.measured_types import choose_types
from stem_edge.export.job.plan import Plan
from stem_edge.export.job.publish import check_apart, check_free, is_bundle, publish
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.stored_types import keep_stored_types
from stem_edge.export.job.table_plan import ExportRows, plan_tables
from stem_edge.export.job.trained_grid import keep_trained_grid
from stem_edge.export.quality_check import accept
from stem_edge.export.quantization.calibration import (
    judged_ids,
    observe,
    read_token_ids,
    sequences,
)
from stem_edge.export.quantization.kv_peaks import TEXT_TOKENS
from stem_edge.export.tables import write_tables
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer, convert_tokenizer
from stem_edge.ggml.installed import installed_library
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import BackboneFormat, EngineName, GgufFormat
from stem_edge.numerics.quantize import F32
from stem_edge.progress import Progress, tell
from stem_edge.shown import format_size
from stem_edge.system.memory import give_back_freed_blocks, return_freed_memory

NO_END = "the tokenizer has no end-of-text token: generation ends at -n tokens or a --stop text"
KEPT_NBYTES = 32 << 20  # freed memory to keep for reuse; with 4 MB, new pages take twice the time


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
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    prefill_graph: bool | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Bundle:
    """Export a checkpoint of any known trainer (checkpoints/readers.py) to a bundle in `out`.

    engine: what runs the bundle: "onnxruntime", or "ggml", the kernels of llama.cpp. Default:
        onnxruntime.
    type: type of the backbone's matrices. "balanced" and "small" store a matrix with 4 bits if that
        costs little, else with 8 bits; the costs are measured on the calibration text. "near-lossless"
        stores all matrices with 8 bits. "keep" keeps the types of a quantized checkpoint. Or one type
        for all: with onnxruntime "int4", "int8" or "fp32"; with ggml one of llama.cpp's mixtures:
        "q4_k_m" (balanced), "q4_0" (small), "q5_k_m", "q6_k", "q8_0" (near-lossless), "f16" or
        "f32". Default: keep if the checkpoint is quantized, else balanced.
    rows: type of the table rows on flash: "int8", "int4", "fp16" or "fp32". "mixed" stores the 5 % most
        frequent tokens of the calibration text as int8, and the other tokens as int4.
        Default: the checkpoint's own codes if its rows are quantized, else int8.
    lora: folder of a PEFT adapter, which is merged into the weights as they are read.
    assistant: folder of Gemma 4's draft model ("assistant"), for speculative decoding with onnxruntime
        on the CPU. It is stored like the backbone if all matrices have one type, else with 8 bits.
        It does not change the generated tokens.
    tokenizer: a tokenizer.json to use instead of the one that the checkpoint names.
    calibration: file of text, or of token ids as .npy or .int32, like the model's later input. It
        decides types, guides the quantizer and balances the channels of the prefill graph.
        On ggml, it measures how important the channels of quantized matrices are.
        Default: a mixed text of 50 kB.
    max_kl: largest mean divergence from the checkpoint, in nats, on the last 512 tokens of the
        calibration text. If the bundle diverges more, the export fails and leaves `out` as it was.
        Default: 0.5.
    prefill_graph: add int8 matrices for prompts, which take one byte per parameter of the layers.
        Default: True if the export quantizes the backbone, unless prompts are less exact with them.
    force: replace `out` if it is a bundle. The old bundle stays whole until the new one is complete.
    threads: number of threads. Default: one for each CPU that this process may use.
    progress: show a progress bar on stderr. Default: a bar on a terminal, else a line every 10 seconds.

    A killed export leaves a folder beside `out`; the next export removes it. Raises CheckpointError, InputError,
    ExportError (FarError if the bundle is too far from the checkpoint) and, with engine "ggml",
    BackendError if ggml is not installed; `out` is then unchanged.
    """
    given = dict(locals())
    for name in ("checkpoint", "out"):
        del given[name]
    return export_with(checkpoint, Path(out), Recipe(**given))


def export_with(checkpoint: str | Path, out: Path, recipe: Recipe) -> Bundle:
    give_back_freed_blocks(KEPT_NBYTES)
    checkpoint = checkpoint_folder(checkpoint, recipe.progress)
    if recipe.assistant is not None:
        recipe = replace(recipe, assistant=checkpoint_folder(recipe.assistant, recipe.progress))
    check_apart(out, [checkpoint, recipe.lora, recipe.assistant])
    ggml = recipe.engine == GgufFormat.engine
    if ggml:
        Ggml(installed_library())  # raises an error before gigabytes are read
    source = read_checkpoint(checkpoint)
    if recipe.lora is not None:
        source = merge_lora(source, recipe.lora)
    tokenizer = _read_tokenizer(source, recipe.tokenizer)
    if ggml:
        check_runnable(source)
    plan = keep_stored_types(source, recipe)
    ids = {"bos_id": tokenizer.bos_id, "eos_ids": tokenizer.eos_ids}
    notes = source.notes + (() if tokenizer.eos_ids else (NO_END,))
    config = msgspec.structs.replace(source.config, **ids)
    plan = replace(plan, source=replace(source, config=config, notes=notes))
    plan = keep_trained_grid(plan)
    if recipe.assistant is not None:
        plan = replace(plan, assistant=open_assistant(Path(recipe.assistant), plan))
    if plan.judged:
        text_ids = read_token_ids(recipe.calibration, tokenizer, config.vocab_size)
        plan = replace(plan, text_ids=text_ids)
        return_freed_memory()  # of the tokenizer: 245 MB with 262,144 tokens
    with publish(out, "a bundle", is_bundle, force=recipe.force) as folder:
        plan = replace(plan, tables=plan_tables(plan.source, plan.rows, plan.counts))
        plan = choose_types(plan)
        footprint = _footprint(plan)
        check_free(out, footprint.flash_nbytes)
        tell(f"writing {_on_disk(footprint)}", recipe.progress)
        with Progress(0, "exporting", recipe.progress) as bar:
            _write(plan, tokenizer, Output(folder, bar))
    return open_bundle(out)


def _on_disk(footprint: Footprint) -> str:
    """Describe the bundle's size on disk."""
    sizes = (footprint.backbone_nbytes, footprint.prefill_nbytes, footprint.tables_nbytes)
    named = zip(sizes, ("weights", "weights for prompts", "tables"), strict=True)
    return ", ".join(f"{format_size(nbytes)} of {what}" for nbytes, what in named if nbytes)


def _read_tokenizer(source: Checkpoint, override: str | Path | None) -> ExportedTokenizer:
    wanted = source.tokenizer
    if override is not None:
        wanted = TokenizerSource("json", Path(override), wanted.add_bos)
    return_freed_memory()  # else the lists of a large vocabulary stay allocated
    converted = convert_tokenizer(wanted.kind, wanted.path, add_bos=wanted.add_bos)
    return_freed_memory()
    if converted.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{wanted.path or wanted.kind}: the tokenizer has {converted.vocab_size} ids, but the "
            f"model only {source.config.vocab_size}; give the model's own with --tokenizer "
            "tokenizer.json"
        )
    return converted


def _footprint(plan: Plan) -> Footprint:
    config, format = plan.source.config, plan.format
    tables = plan.tables.format if plan.tables else None
    if plan.recipe.engine == GgufFormat.engine:
        return gguf_footprint(config, cast(GgufFormat, format), tables)
    return onnx_footprint(config, cast(BackboneFormat, format), tables, *onnx_nbytes(plan))


def _write(plan: Plan, tokenizer: ExportedTokenizer, out: Output) -> None:
    """Write all files of the bundle, compare it with its checkpoint, and write the manifest."""
    source, config, bar = plan.source, plan.source.config, out.bar
    ids, exact = judged_ids(plan.text_ids, config.max_context), None
    peaks = dict[str, F32]()
    if plan.judged:
        bar.begin("computing with the checkpoint")
        texts = (
            sequences(plan.text_ids, TEXT_TOKENS, config.max_context)
            if plan.format.kv_peaks
            else ()
        )
        exact, peaks = observe(source, ids, texts, plan.recipe.cpus)
    out.write(TOKENIZER, tokenizer.json.encode())
    texts_of = msgspec.json.encode(tokenizer.config, order="sorted")
    out.write(TOKENIZER_CONFIG, msgspec.json.format(texts_of, indent=1) + b"\n")
    if plan.tables is not None:
        bar.begin("writing tables", 4 * config.table_parameters)
        write_tables(out, plan.tables, source.tables, plan.recipe.cpus)
    written = plan.format
    if plan.recipe.engine == GgufFormat.engine:
        write_gguf_backbone(plan, out)
    else:
        written = write_onnx(plan, out, peaks)
    if plan.assistant is not None:
        write_assistant(plan.assistant, plan, out)
    if exact is not None:
        bar.begin("comparing with the checkpoint")
    return_freed_memory()  # memory of the writers, because the engine needs as much
    manifest = accept(plan, out, written, ids, exact)
    write_file(out.folder / MANIFEST, encode_manifest(manifest))

"""The command `stem-edge inspect`: what a bundle is made of, for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, get_args

import msgspec

import stem_edge
from stem_edge.bundle.manifest import GGUF, TABLES, Bundle, Manifest, open_bundle
from stem_edge.bundle.quality_report import QualityReport
from stem_edge.commands.arguments import engine_name
from stem_edge.commands.providers import (
    add_listing,
    check_listing,
    is_listing,
    parse_libraries,
    parse_providers,
    show_listing,
)
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.ggml.gguf_schema import matrix_types
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.graph.formats import MATRIX_KINDS, VOCABULARY_KINDS, BackboneFormat, EngineName
from stem_edge.measuring.analysis.cost_report import cost_figures, cost_report, cost_table
from stem_edge.measuring.analysis.geometry_report import add_options, check_options, show_geometry
from stem_edge.tables.rows import RecordLayout
from stem_edge.text_table import printable
from stem_edge.units import format_size

if TYPE_CHECKING:
    from stem_edge.runtime import MemoryPlan

DESCRIPTION = """\
Show a bundle: architecture, STEM layers, parameters in all and for one token, bytes on flash and
of the backbone, types, quality of the export, files. Reads only the manifest.
With --memory, show instead what loading it here and now would take; with --cost, what a layer, the
whole model and a text cost by the formulas of the STEM paper; with --geometry, how the rows of the
tables lie to each other, which reads the tables once from end to end. With --providers, and no
bundle: what onnxruntime can compute on here."""

FILES_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.commands.main.Command."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", nargs="?", help="folder that stem-edge export wrote"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--memory",
        nargs="?",
        const="",
        metavar="SIZE",
        help="show the memory plan under this limit, like 600MB (what the machine leaves)",
    )
    instead.add_argument(
        "--cost", action="store_true", help="show the costs that the STEM paper counts"
    )
    instead.add_argument(
        "--geometry", action="store_true", help="show how rows spread over directions, and norms"
    )
    add_listing(parser)
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="for --memory and --cost, in tokens"
    )
    parser.add_argument(
        "--engine",
        type=engine_name,
        choices=("auto", *get_args(EngineName)),
        default="auto",
        help="for --memory: what runs the backbone (as load chooses)",
    )
    parser.add_argument(
        "--repack", action="store_true", help="for --memory: with ggml's matrices rearranged"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="for --cost: how many rows this text uses; for --geometry: what FFNs make of it",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """See stem_edge.commands.main.Command."""
    if args.bundle is None and args.memory and Path(args.memory).is_dir():
        args.bundle, args.memory = args.memory, ""  # of `--memory BUNDLE`
    check_listing(args)
    if args.text is not None and not (args.cost or args.geometry):
        raise InputError(
            f"--text {args.text} belongs to --cost or --geometry, and neither is given; add --cost "
            "or --geometry"
        )
    check_options(args)
    if args.memory is None and (args.repack or args.engine != "auto"):
        raise InputError(
            "--engine and --repack belong to --memory, which is not given; add --memory"
        )
    if is_listing(args):
        show_listing(args)
    elif args.geometry:
        show_geometry(args)
    else:
        shown = _asked(args)
        print(json.dumps(shown, indent=1) if args.json else shown)
    return 0


def _asked(args: argparse.Namespace) -> object:
    """What is asked for: figures for JSON, or a text."""
    if args.cost:
        report = cost_report(args.bundle, args.context_length, args.text)
        return cost_figures(report) if args.json else cost_table(report)
    if args.memory is None:
        bundle = open_bundle(args.bundle)
        return figures(bundle.manifest) if args.json else table(bundle)
    plan = stem_edge.memory_plan(
        args.bundle,
        args.memory or None,
        args.context_length,
        engine=args.engine,
        repack=args.repack,
        providers=parse_providers(args.providers),
        provider_libraries=parse_libraries(args.provider_library),
        device_memory=args.device_memory,
    )
    return memory_figures(plan) if args.json else memory_table(plan)


def figures(manifest: Manifest) -> dict[str, object]:
    """The manifest and what follows from it, as plain JSON values."""
    model, tables = manifest.model, manifest.tables
    derived: dict[str, object] = {
        "parameters": model.backbone_parameters + model.table_parameters,
        "parameters_active": model.active_parameters,
        "parameters_tables": model.table_parameters,
        "record_nbytes": tables.record_nbytes if tables else 0,
        "flash_nbytes": _nbytes(manifest, TABLES),
        "backbone_nbytes": sum(r.backbone_nbytes for r in manifest.reports.values()),
    }
    return derived | dict(msgspec.to_builtins(manifest))


def memory_figures(plan: MemoryPlan) -> dict[str, object]:
    """The plan as plain JSON values, bytes and counts."""
    figures = asdict(plan) | {"total": plan.total}
    if plan.device:
        figures["device"] |= {"total": plan.device.total}
    return figures


def memory_table(plan: MemoryPlan) -> str:
    """The plan for people: anonymous memory, part by part."""
    lines = [_amount("engine", plan.engine)]
    lines += [_amount("provider", plan.provider)] if plan.variant else []
    lines += _parts([*plan.parts(), ("anonymous memory at most", plan.total)])
    if plan.prefill_refused:
        lines += ["", *wrap(f"prefill graph not used: {plan.prefill_refused}")]
    if plan.device is not None:
        lines += ["", f"memory of the device ({plan.provider}, {plan.variant})"]
        lines += _parts([*plan.device.parts(), ("at most", plan.device.total)])
    return "\n".join(lines)


def _amount(name: str, shown: str) -> str:
    return f"{name:<34}{shown:>10}"


def _parts(parts: list[tuple[str, int]]) -> list[str]:
    return [_amount(name, format_size(nbytes)) for name, nbytes in parts]


def table(bundle: Bundle) -> str:
    """A readable table, as wide as a small terminal."""
    lines = [str(bundle.path)]
    for section in (_architecture, _storage, _quality, _files):
        rows = section(bundle.manifest)
        lines += ["", *(f"{name:<22}{value}".rstrip() for name, value in rows)]
    return "\n".join(lines)


Rows = Iterator[tuple[str, str]]


def _architecture(manifest: Manifest) -> Rows:
    model = manifest.model
    layers = ", ".join(map(str, model.stem_layers)) or "none, a dense model"
    total = model.backbone_parameters + model.table_parameters
    yield "architecture", f"{model.n_layers} layers, {model.dim} wide, d_ff {model.d_ff}"
    heads = f"{model.n_heads} heads, {model.n_kv_heads} for keys and values"
    yield "attention", f"{heads}, {model.head_dim} wide"
    yield "", _attention_details(model)
    yield "STEM layers", f"{len(model.stem_layers)} of {model.n_layers}: {layers}"
    if model.stem_layers:
        yield "  their FFN", _ffn(model)
    head = "tied to the embedding" if model.tied_head else "of its own"
    yield "vocabulary", f"{model.vocab_size:,} tokens, head {head}"
    yield "context", f"{model.max_context:,} tokens"
    yield "parameters", f"{total:,}"
    yield "  in tables", f"{model.table_parameters:,} ({model.table_parameters / total:.0%})"
    yield "  active per token", f"{model.active_parameters:,}"


def _attention_details(model: ModelConfig) -> str:
    details = ["RoPE in pairs" if model.rope_interleaved else "RoPE in halves"]
    scaling = model.rope_scaling
    details += [f"scaled as {scaling.__struct_config__.tag}"] if scaling else []
    details += [f"window of {model.sliding_window}"] if model.sliding_window else []
    details += ["q and k normed"] if model.qk_norm_eps is not None else []
    details += [f"biases: {', '.join(model.biases)}"] if model.biases else []
    details += ["post norms"] if model.post_norms else []
    details += [f"logits capped at {model.logit_softcap:g}"] if model.logit_softcap else []
    return ", ".join(details)


def _ffn(model: ModelConfig) -> str:
    if model.n_experts:
        return f"{model.stem_ffn}, {model.n_experts} experts, one a token"
    return model.stem_ffn + (f", rows of rank {model.row_rank}" if model.row_rank else "")


def _storage(manifest: Manifest) -> Rows:
    backbone, gguf, tables = manifest.backbone, manifest.gguf, manifest.tables
    if backbone is not None:
        nbytes = format_size(manifest.reports["onnxruntime"].backbone_nbytes)
        yield "backbone", f"{nbytes}, {_weights(backbone)}"
        types = dict.fromkeys(map(backbone.type_of, VOCABULARY_KINDS))
        yield "  embedding, head", " and ".join(types)
        prefill = "none"
        if backbone.prefill:
            nbytes = format_size(manifest.files[PREFILL_DATA].nbytes)
            prefill = f"including {nbytes} of int8 weights for prompts"
        yield "  prefill graph", prefill
    if gguf is not None:
        weighted = ", channels weighted by a text" if gguf.importance else ""
        nbytes = format_size(manifest.files[GGUF].nbytes)
        yield "backbone for ggml", f"{nbytes}, {gguf.weights}{weighted}"
        # Rows that no K-quant fits are stored in other types, which is not in the mixture's name.
        counts = Counter(t.name for t in matrix_types(manifest.model, gguf.weights))
        stored = [f"{name} in {count} of {counts.total()}" for name, count in counts.most_common()]
        yield "  types of matrices", ", ".join(stored)
    if tables is not None:
        nbytes = format_size(_nbytes(manifest, TABLES))
        yield "tables on flash", f"{nbytes}, {_row_types(tables, manifest.rare_tables)}"
        record = format_size(tables.record_nbytes)
        yield "  one record", f"{record}, what a token reads at most"
    checkpoint = max(report.checkpoint_nbytes for report in manifest.reports.values())
    yield "checkpoint was", format_size(checkpoint)


def _weights(backbone: BackboneFormat) -> str:
    """Types of the layers' matrices and how their codes were found."""
    types: list[str] = [backbone.weights]
    types += [f"{k} {t}" for k, t in backbone.kinds.items() if k not in VOCABULARY_KINDS]
    quantized = any(backbone.bits(k) < 32 for k in MATRIX_KINDS if k not in VOCABULARY_KINDS)
    details = ", ".join(types) + (f" in blocks of {backbone.block_size}" if quantized else "")
    details += ", asymmetric" if backbone.asymmetric else ""
    return details + (f", by {backbone.quantizer}" if backbone.quantizer != "rtn" else "")


def _row_types(tables: RecordLayout, rare: RecordLayout | None) -> str:
    groups = f" in groups of {tables.group_size}" if tables.quantized else ""
    if rare is None:
        return f"{tables.row_type}{groups}"
    frequent = tables.records - rare.records
    return f"int8 of {frequent:,} records{groups}, int4 of {rare.records:,}"


def _quality(manifest: Manifest) -> Rows:
    for engine in manifest.engines:
        if len(manifest.engines) > 1:
            yield "on " + engine, ""
        yield from _report(manifest.reports[engine])
        gptq = manifest.backbone is not None and manifest.backbone.quantizer == "gptq"
        if gptq and engine == "onnxruntime":
            yield "", "GPTQ accepts larger weight errors for smaller output errors"
        yield from (("note", printable(note)) for note in manifest.reports[engine].notes)


def _report(report: QualityReport) -> Rows:
    divergence = f"{report.divergence:g} nats from the checkpoint, mean"
    if report.divergence_99 is not None:
        divergence += f"; 99th percentile {report.divergence_99:g}"
    yield "divergence", divergence
    if report.prefill_divergence is not None:
        apart = report.prefill_from_decode
        further = "" if apart is None else f", and {apart:g} from the graphs that decode"
        yield "  of prefill graph", f"{report.prefill_divergence:g} nats{further}"
    if report.agreement is not None:
        yield "same best token", f"at {report.agreement:.1%} of positions"
    difference = f"{report.worst_logit_difference:g} at most, on {len(report.probe_tokens)} tokens"
    yield "logit difference", f"{difference} (logits up to {report.greatest_logit:g})"
    yield "quantization error", f"{'worst':>8}{'mean':>8}  of the greatest value in a row"
    for kind, error in report.errors.items():
        yield f"  {printable(kind)}", f"{error.worst:>8.2%}{error.mean:>8.2%}"


def _files(manifest: Manifest) -> Rows:
    names = sorted(manifest.files)
    for name in names[:FILES_SHOWN]:
        yield format_size(manifest.files[name].nbytes), name
    if rest := names[FILES_SHOWN:]:
        nbytes = sum(manifest.files[name].nbytes for name in rest)
        yield format_size(nbytes), f"in {len(rest)} more files"


def _nbytes(manifest: Manifest, folder: str) -> int:
    return sum(e.nbytes for name, e in manifest.files.items() if name.startswith(folder + "/"))

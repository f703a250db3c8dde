"""The command `stem-edge export`."""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
from pathlib import Path
from typing import Any

from stem_edge.bundle.manifest import TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle
from stem_edge.commands.bundles.bundle_report import bundle_table
from stem_edge.commands.options.arguments import BACKBONE_FOR, own_command
from stem_edge.commands.options.described import add_described
from stem_edge.errors import ExportError
from stem_edge.export.backbone.forms import FORMS
from stem_edge.export.exporter import export_bundle, export_with
from stem_edge.export.job.options import (
    BACKBONES,
    CHOSEN,
    FAR,
    NEAR,
    ONNX_ONLY,
    QUANTIZERS,
    ExportOptions,
)
from stem_edge.export.job.recipe import QUALITIES
from stem_edge.export.job.table_plan import EXPORT_TABLES
from stem_edge.export.ngram_export import export_rows
from stem_edge.graph.formats import MATRIX_KINDS
from stem_edge.runtime.rows.ngram_rows import open_rows
from stem_edge.tables.token_counts import read_counts
from stem_edge.units import format_size

VERDICTS = (
    (NEAR, "near", "its texts are about as good"),
    (FAR, "fairly near", "its texts are worse, but of the same kind"),
    (math.inf, "far from", "its texts are those of another, worse model"),
)
FEW_TOKENS = 1000  # of a calibration text; fewer do not say which channels and tokens matter
DESCRIPTION = """\
Turn a trained checkpoint into a bundle, the folder that the other commands take.

CHECKPOINT comes from one of
  the public STEM trainer   the folder of one training step (params.json, .metadata, __*.distcp,
                            stem_shards/) or a consolidated folder
  Hugging Face              config.json and *.safetensors: Llama, Mistral, Qwen2, Qwen3, SmolLM, and
                            STEM models of any trainer in this project's schema (docs/models.md)
  llama.cpp and others      FILE.gguf: Llama, Mistral, Qwen2, Qwen3, SmolLM
  BlaGPT                    state_step*.pt or best_model*.pt, or their folder
Nothing in it is executed. OUT appears only when the export is complete."""

EPILOG = """\
examples:
  stem-edge export runs/0000100000 model
  stem-edge export runs/0000100000/consolidated model --backbone int8 --tables int4
  stem-edge export runs/0000100000 exact --backbone fp32 --tables fp32
  stem-edge export SmolLM2-135M smol --lora adapter
  stem-edge export SmolLM2-135M smol --quality near-lossless
  stem-edge export SmolLM2-135M smol --size 100MB
  stem-edge export runs/0000100000 model --calibration prompt.txt --max-kl 0.02
  stem-edge export SmolLM2.Q4_K_M.gguf model --engine gguf
  stem-edge export Qwen3.8-Flash-Next rows --tables-only --tables int4"""

BACKBONE_HELP = """\
onnx runs on onnxruntime, which is always installed, on processors and accelerators. gguf runs on
ggml, the kernels of llama.cpp (pip install 'stem-edge[gguf]'), on processors only; its weights
can stay in the file, so that the system may drop them when memory is short. Its types are
llama.cpp's mixtures: q4_k_m is the usual one, q4_0 the fastest with --repack, q6_k and q8_0 are
nearly exact, f16 and f32 are not quantized; without one, a GGUF file keeps its own types."""


ROWS_HELP = """write no bundle, but the tables of n-grams of a Qwen3.8-Flash-Next, DeepSeek-V4.1 or
LongCat checkpoint, as stored or with --tables int8 or int4, for a server of its backbone
(docs/ngrams.md)"""


def _bits(text: str) -> dict[str, int]:
    """Parse KIND=BITS,... into a mapping; export_bundle checks the kinds and bits."""
    try:
        return {kind: int(bits) for kind, bits in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like head=8,down=8") from None


SETTINGS: dict[str, dict[str, Any]] = {
    "calibration": {"metavar": "FILE"},
    "calibration_tokens": {"type": int, "metavar": "COUNT"},
    "lora": {"metavar": "DIR"},
    "assistant": {"metavar": "PATH"},
    "tokenizer": {"metavar": "FILE"},
    "ignore_keys": {
        "flags": ("--ignore-key",),
        "action": "append",
        "default": [],
        "metavar": "KEY",
        "help": "key of config.json that you know to change nothing, where the export asks; once for "
        "each key",
    },
    "engine": {
        "type": lambda name: BACKBONE_FOR.get(name, name),
        "choices": list(BACKBONES),
        "help": "what runs the backbone (default: what --backbone is for, else onnx)",
    },
    "backbone": {
        "type": str.lower,  # because llama.cpp writes Q4_K_M
        "choices": [name for types, _ in BACKBONES.values() for name in types],
        "metavar": "TYPE",
        "help": "; ".join(
            f"{engine}: {', '.join(types)} (default: {'by --quality' if engine == 'onnx' else usual})"
            for engine, (types, usual) in BACKBONES.items()
        ),
    },
    "quality": {"choices": QUALITIES},
    "size": {"metavar": "SIZE"},
    "head": {"choices": list(CHOSEN)},
    "bits": {
        "type": _bits,
        "metavar": "KIND=BITS,...",
        "help": f"4, 8 or 32 bits for some kinds of matrices ({', '.join(MATRIX_KINDS)}), like "
        "head=8,down=8",
    },
    "block_size": {"type": int, "metavar": "N"},
    "asymmetric": {"action": argparse.BooleanOptionalAction},
    "quantizer": {"choices": QUANTIZERS},
    "prefill_graph": {"action": argparse.BooleanOptionalAction},
    "tables": {"choices": EXPORT_TABLES},
    "frequent": {"type": float, "metavar": "SHARE"},
    "group_size": {"type": int, "metavar": "N"},
    "max_kl": {"type": float, "metavar": "NATS"},
    "accept_far": {"action": "store_true"},
    "threads": {"type": int, "metavar": "N"},
    "force": {"action": "store_true"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder or file of the checkpoint, hf:org/name, or hf:org/name:FILE.gguf",
    )
    parser.add_argument("out", metavar="OUT", help="folder of the new bundle")
    _add(parser, "calibration", "calibration_tokens", "lora", "tokenizer", "ignore_keys")
    _add(parser.add_argument_group("backbone", BACKBONE_HELP), "engine", "backbone")
    _add(parser.add_argument_group("backbone, --engine onnx only"), *ONNX_ONLY, "assistant")
    tables = parser.add_argument_group("tables")
    _add(tables, "tables", "frequent", "group_size")
    tables.add_argument("--tables-only", action="store_true", help=ROWS_HELP)
    _add(parser, "max_kl", "accept_far", "threads", "force")


def _add(group: argparse._ActionsContainer, *names: str) -> None:
    add_described(group, export_bundle, {name: SETTINGS[name] for name in names})


def run(args: argparse.Namespace) -> int:
    if args.tables_only:
        return _run_rows(args)
    others = ("checkpoint", "out", "tables_only")
    given = {name: value for name, value in vars(args).items() if name not in others}
    options = ExportOptions(**given)  # its fields must have the names of the options
    bundle = export_with(args.checkpoint, Path(args.out), options)
    print("\n".join(_verdict(args, bundle, options)), end="\n\n")
    print(bundle_table(bundle), end="\n\n")
    print(f"try it: {own_command()} generate {args.out} 'Once upon a time'")
    return 0


def _verdict(args: argparse.Namespace, bundle: Bundle, options: ExportOptions) -> list[str]:
    """Say how near the bundle is to its checkpoint, and what would bring it nearer."""
    report = bundle.manifest.reports[options.runs_on]
    same, tokens = report.agreement or 0.0, len(report.probe_tokens)
    if not tokens:
        return ["kept as stored: nothing was calibrated or compared (stem-edge eval compares)"]
    nats = max(report.divergence, report.prefill_divergence or 0.0)
    word, means = next((word, means) for most, word, means in VERDICTS if nats <= most)
    lines = [
        f"{word} the checkpoint: {means} ({nats:g} nats, the same best token at {same:.1%} of {tokens} positions)"
    ]
    if nats > NEAR:
        again = shlex.join([str(args.checkpoint), str(args.out)])
        lines += [f"nearer: {own_command()} export {again} {FORMS[options.runs_on].nearer} --force"]
    counts = read_counts(bundle.path / TOKEN_COUNTS, bundle.manifest.model.vocab_size)
    if options.calibration and counts is not None and (used := int(counts.sum())) < FEW_TOKENS:
        lines += [f"the calibration text has {used} tokens; it takes some thousands to be of use"]
    return lines


def _run_rows(args: argparse.Namespace) -> int:
    out = export_rows(**_given_rows(args))
    with open_rows(out) as rows:
        for table in rows.tables:
            keys = table.hash
            print(
                f"{out}: {table.name}, {format_size(table.nbytes)}: {keys.rows:,} rows of {table.width} "
                f"values ({table.stored}), {keys.heads} for each token"
            )
    print(f"gather them: stem_edge.open_rows({str(out)!r}).rows(ids)")
    return 0


def _given_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were typed. Raises ExportError for one that export_rows does not take."""
    given = {
        key: value
        for key, value in vars(args).items()
        if key != "tables_only"
        and value is not None
        and value is not False  # but keep zeros, which were typed
        and value != []
    }
    if others := given.keys() - inspect.signature(export_rows).parameters:
        other = "--" + min(others).replace("_", "-")
        raise ExportError(f"{other} is for bundles, and --tables-only makes none; leave it out")
    return given

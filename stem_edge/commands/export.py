"""The command `stem-edge export`."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from stem_edge.bundle.manifest import TOKEN_COUNTS, WORKING, Bundle
from stem_edge.commands.arguments import BACKBONE_FOR, own_command
from stem_edge.commands.inspect import table
from stem_edge.errors import ExportError
from stem_edge.export.dense_gguf import export_dense_gguf
from stem_edge.export.exporter import export_with
from stem_edge.export.job.options import (
    BACKBONES,
    BLOCK_SIZE,
    CALIBRATION_TOKENS,
    QUANTIZERS,
    ExportOptions,
)
from stem_edge.export.job.table_plan import EXPORT_TABLES, FREQUENT
from stem_edge.graph.formats import MATRIX_KINDS, WEIGHT_BITS
from stem_edge.tables.token_counts import read_counts
from stem_edge.units import format_size

LLAMA = "llama.cpp"
LOW_AGREEMENT = 0.8  # below, a model writes noticeably other texts
FEW_TOKENS = 1000
DESCRIPTION = """\
Turn a trained checkpoint into a bundle.

CHECKPOINT is one of
  the public STEM trainer's   the folder of one training step (params.json, .metadata, __*.distcp,
                              stem_shards/) or a consolidated folder
  Hugging Face's              config.json and *.safetensors: Llama, Mistral, Qwen2, Qwen3, SmolLM,
                              and STEM models of any trainer in this project's schema (docs/models.md)
  BlaGPT's                    state_step*.pt or best_model*.pt, or their folder
Nothing in it is executed. OUT appears when the export is complete, and not before; an export that
was interrupted or killed goes on where it stood when it is started again."""

EPILOG = """\
examples:
  stem-edge export runs/0000100000 model
  stem-edge export runs/0000100000/consolidated model --backbone int8 --tables int4
  stem-edge export runs/0000100000 exact --backbone fp32 --tables fp32
  stem-edge export SmolLM2-135M smol --lora adapter
  stem-edge export runs/0000100000 model --calibration prompt.txt --max-kl 0.1
  stem-edge export runs/0000100000 model --backbone q4_k_m --add
  stem-edge export SmolLM2-135M smol.gguf --engine llama.cpp --backbone q8_0"""

BACKBONE_HELP = """\
onnx runs on onnxruntime, which is always there: on processors and, through its providers, on
accelerators. gguf runs on ggml's kernels (pip install 'stem-edge[gguf]'), on processors only, and
can leave weights in the file, where the system may drop them when memory is short. Its types are
llama.cpp's mixtures: q4_k_m is the usual one, q4_0 the fastest to rearrange, q6_k and q8_0 are
nearly exact, f16 and f32 are not quantized. A bundle can have both, which share its tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.commands.main.Command."""
    parser.epilog = EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of the new bundle")
    _add_source(parser)
    _add_backbone(parser)
    _add_onnx(parser)
    _add_tables(parser)
    parser.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="fail, and leave OUT as it was, if the mean divergence from the checkpoint on a few "
        "tokens (of the calibration text, if there is one) is greater",
    )
    parser.add_argument("--threads", type=int, help="threads that quantize (all CPUs)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a bundle")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text, or token ids as .npy or .int32, of the kind that the model will see: warms the "
        "row cache, balances the prefill graph, guides the quantizer",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="COUNT",
        help=f"how many of its tokens, at most, guide the quantizer ({CALIBRATION_TOKENS})",
    )
    parser.add_argument(
        "--lora", metavar="DIR", help="a PEFT adapter, merged into the weights as they are read"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json instead of the checkpoint's tokenizer"
    )


def _add_backbone(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("backbone", BACKBONE_HELP)
    group.add_argument(
        "--engine",
        type=lambda name: BACKBONE_FOR.get(name, name),
        choices=[*BACKBONES, LLAMA],
        help=f"what runs the backbone (onnx, or that of the --backbone); {LLAMA}: instead of a "
        "bundle, OUT becomes an ordinary GGUF file of a dense checkpoint, which llama.cpp runs by "
        "itself",
    )
    group.add_argument(
        "--backbone",
        type=str.lower,  # llama.cpp writes Q4_K_M
        choices=[name for types, _ in BACKBONES.values() for name in types],
        metavar="TYPE",
        help="; ".join(
            f"{engine}: {', '.join(types)} ({usual})"
            for engine, (types, usual) in BACKBONES.items()
        ),
    )
    group.add_argument(
        "--add",
        action="store_true",
        help="put the backbone into the bundle OUT, beside that of the other engine or in place of "
        "an older one; its tables and everything else stay, and must be of this checkpoint",
    )


def _add_onnx(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("backbone, --engine onnx only")
    group.add_argument(
        "--head", choices=list(WEIGHT_BITS), help="type of embedding and head (as --backbone)"
    )
    group.add_argument(
        "--bits",
        type=_bits,
        metavar="KIND=BITS,...",
        help=f"4, 8 or 32 bits for some kinds of matrices ({', '.join(MATRIX_KINDS)}), as in "
        "--bits head=8,down=8",
    )
    group.add_argument(
        "--block-size", type=int, help=f"backbone values that share a scale ({BLOCK_SIZE})"
    )
    group.add_argument(
        "--asymmetric", action="store_true", help="give each block of the backbone a zero point"
    )
    group.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        help="how the backbone's codes are found: rtn rounds, search finds the scales that lose "
        "least, gptq lets weights make up for each other (gptq with --calibration, else search)",
    )
    group.add_argument(
        "--prefill-graph",
        action=argparse.BooleanOptionalAction,
        help="add int8 matrices for prompts (with a quantized backbone, if they are as exact)",
    )


def _add_tables(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tables")
    group.add_argument(
        "--tables",
        choices=EXPORT_TABLES,
        help="type of the rows on flash (int8); mixed: int8 of frequent tokens, int4 of the others",
    )
    group.add_argument(
        "--frequent",
        type=float,
        metavar="SHARE",
        help="share of the records that mixed tables keep at 8 bits, those that the "
        f"calibration text uses most ({FREQUENT:g})",
    )
    group.add_argument(
        "--group-size", type=int, help="row values that share a scale (int4: 32, else 128)"
    )


def run(args: argparse.Namespace) -> int:
    """See stem_edge.commands.main.Command."""
    if args.engine == LLAMA:
        return _run_dense(args)
    # The options are those of export_bundle, name by name.
    given = {name: value for name, value in vars(args).items() if name not in ("checkpoint", "out")}
    options = ExportOptions(**given)
    try:
        bundle = export_with(args.checkpoint, Path(args.out), options)
    except KeyboardInterrupt:
        out = Path(args.out)
        kept = out.with_name(WORKING + out.name)
        if kept.exists():
            print(
                f"stem-edge: the same command goes on where this stood; {kept} is kept for that",
                file=sys.stderr,
            )
        raise
    print(table(bundle))
    second = options.runs_on == "ggml" and len(bundle.manifest.engines) > 1
    engine = " --engine ggml" if second else ""
    print("\n" + "\n".join(_verdict(bundle, options)))
    print(f"try it: {own_command()} generate {args.out}{engine} 'Once upon a time'")
    return 0


def _verdict(bundle: Bundle, options: ExportOptions) -> list[str]:
    """How near the bundle is to its checkpoint, and what would bring it nearer."""
    report = bundle.manifest.reports[options.runs_on]
    same, tokens = report.agreement or 0.0, len(report.probe_tokens)
    found = f"the checkpoint: the same best token at {same:.1%} of {tokens} positions"
    lines = [f"near {found}"]
    if same < LOW_AGREEMENT:
        lines = [f"far from {found}; more bits (--backbone, --tables) or a --calibration text help"]
    counts = read_counts(bundle.path / TOKEN_COUNTS, bundle.manifest.model.vocab_size)
    if options.calibration and counts is not None and (used := int(counts.sum())) < FEW_TOKENS:
        lines += [f"the calibration text has {used} tokens; it takes some thousands to be of use"]
    return lines


def _run_dense(args: argparse.Namespace) -> int:
    given = {
        name: value
        for name, value in vars(args).items()
        if name != "engine" and value is not None and value is not False  # but zeros
    }
    if others := given.keys() - inspect.signature(export_dense_gguf).parameters:
        option = "--" + min(others).replace("_", "-")
        raise ExportError(
            f"{option} belongs to bundles, and --engine {LLAMA} makes none; leave it out"
        )
    out = export_dense_gguf(**given)
    print(f"{out}: {format_size(out.stat().st_size)}; run it with llama.cpp: llama-cli -m {out}")
    return 0


def _bits(text: str) -> dict[str, int]:
    """KIND=BITS,... as a mapping; export_bundle says which kinds and bits there are."""
    try:
        return {kind: int(bits) for kind, bits in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like head=8,down=8") from None

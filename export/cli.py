"""The command `stem-edge export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stem_edge.bundle import MATRIX_KINDS, WEIGHT_BITS, Bundle
from stem_edge.export.exporter import export_bundle
from stem_edge.export.files import WORKING
from stem_edge.export.options import CALIBRATION_TOKENS, QUANTIZERS
from stem_edge.export.table_plan import EXPORT_TABLES, FREQUENT
from stem_edge.inspect_cli import table

DESCRIPTION = """\
Turn a trained checkpoint into a bundle.

CHECKPOINT is one of
  the public STEM trainer's   the folder of one training step (params.json, .metadata, __*.distcp,
                              stem_shards/) or a consolidated folder
  Hugging Face's              config.json and *.safetensors: Llama, Mistral, Qwen2, Qwen3, SmolLM,
                              and STEM models of any trainer in this project's schema (README)
  BlaGPT's                    state_step*.pt or best_model*.pt, or their folder
Nothing in it is executed. OUT appears when the export is complete, and not before; an export that
was interrupted or killed goes on where it stood when it is started again."""

EPILOG = """\
examples:
  stem-edge export runs/0000100000 model
  stem-edge export runs/0000100000/consolidated model --backbone int8 --tables int4
  stem-edge export runs/0000100000 exact --backbone fp32 --tables fp32
  stem-edge export SmolLM2-135M smol --lora adapter
  stem-edge export runs/0000100000 model --calibration prompt.txt --max-kl 0.1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.cli.Command."""
    parser.epilog = EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of the new bundle")
    weights = list(WEIGHT_BITS)
    parser.add_argument(
        "--backbone", choices=weights, default="int4", help="type of the layers' matrices (int4)"
    )
    parser.add_argument(
        "--tables",
        choices=EXPORT_TABLES,
        default="int8",
        help="type of the rows on flash (int8); mixed: int8 of frequent tokens, int4 of the others",
    )
    parser.add_argument(
        "--frequent",
        type=float,
        metavar="SHARE",
        help="share of the records that mixed tables keep at 8 bits, those that the "
        f"calibration text uses most ({FREQUENT:g})",
    )
    parser.add_argument(
        "--head",
        choices=weights,
        help="type of embedding and head (as --backbone)",
    )
    parser.add_argument(
        "--bits",
        type=_bits,
        metavar="KIND=BITS,...",
        help=f"4, 8 or 32 bits for some kinds of matrices ({', '.join(MATRIX_KINDS)}), as in "
        "--bits head=8,down=8",
    )
    parser.add_argument(
        "--block-size", type=int, default=128, help="backbone values that share a scale (128)"
    )
    parser.add_argument(
        "--asymmetric", action="store_true", help="give each block of the backbone a zero point"
    )
    parser.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        help="how the backbone's codes are found: rtn rounds, search finds the scales that lose "
        "least, gptq lets weights make up for each other (gptq with --calibration, else search)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        help="row values that share a scale (int4: 32, else 128)",
    )
    parser.add_argument(
        "--prefill-graph",
        action=argparse.BooleanOptionalAction,
        help="add int8 matrices for prompts (with a quantized backbone, if they are as exact)",
    )
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
    parser.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="fail, and leave OUT as it was, if the mean divergence from the checkpoint on a few "
        "tokens (of the calibration text, if there is one) is greater",
    )
    parser.add_argument("--threads", type=int, help="threads that quantize (all CPUs)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a bundle")


def run(args: argparse.Namespace) -> int:
    """See stem_edge.cli.Command."""
    try:
        bundle = _export(args)
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
    print(f"\ntry it: stem-edge generate {args.out} -p 'Once upon a time'")
    return 0


def _export(args: argparse.Namespace) -> Bundle:
    return export_bundle(
        args.checkpoint,
        args.out,
        backbone=args.backbone,
        tables=args.tables,
        frequent=args.frequent,
        head=args.head,
        bits=args.bits,
        block_size=args.block_size,
        asymmetric=args.asymmetric,
        quantizer=args.quantizer,
        group_size=args.group_size,
        prefill_graph=args.prefill_graph,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens,
        lora=args.lora,
        tokenizer=args.tokenizer,
        max_kl=args.max_kl,
        threads=args.threads,
        force=args.force,
    )


def _bits(text: str) -> dict[str, int]:
    """KIND=BITS,... as a mapping; export_bundle says which kinds and bits there are."""
    try:
        return {kind: int(bits) for kind, bits in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like head=8,down=8") from None

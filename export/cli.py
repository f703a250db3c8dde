"""The command `stem-edge export`."""

from __future__ import annotations

import argparse

from stem_edge.bundle import WEIGHT_BITS
from stem_edge.export.exporter import export_bundle
from stem_edge.inspect_cli import table
from stem_edge.rows import ROW_TYPES

DESCRIPTION = """\
Turn a checkpoint of the public STEM trainer (built on Meta Lingua) into a bundle.

CHECKPOINT is the folder of one training step (params.json, .metadata, __*.distcp, stem_shards/) or
a consolidated folder (params.json, consolidated.pth, consolidated_stem.pth). Nothing in it is
executed. OUT appears when the export is complete, and not before; an export that was interrupted or
killed goes on where it stood when it is started again."""

EPILOG = """\
examples:
  stem-edge export runs/0000100000 model
  stem-edge export runs/0000100000/consolidated model --backbone int8 --tables int4
  stem-edge export runs/0000100000 exact --backbone fp32 --tables fp32
  stem-edge export runs/0000100000 model --calibration prompt.txt --max-kl 0.1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.cli.Command."""
    parser.epilog = EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of the new bundle")
    weights = list(WEIGHT_BITS)
    parser.add_argument(
        "--backbone", choices=weights, default="int4", help="type of the layers' matrices (int4)"
    )
    parser.add_argument(
        "--tables", choices=ROW_TYPES, default="int8", help="type of the rows on flash (int8)"
    )
    parser.add_argument(
        "--head",
        choices=weights,
        help="type of embedding and head (as --backbone)",
    )
    parser.add_argument(
        "--block-size", type=int, default=128, help="backbone values that share a scale (128)"
    )
    parser.add_argument(
        "--group-size", type=int, help="row values that share a scale (int8: 128, int4: 32)"
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
        "row cache and balances the prefill graph",
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
    bundle = export_bundle(
        args.checkpoint,
        args.out,
        backbone=args.backbone,
        tables=args.tables,
        head=args.head,
        block_size=args.block_size,
        group_size=args.group_size,
        prefill_graph=args.prefill_graph,
        calibration=args.calibration,
        tokenizer=args.tokenizer,
        max_kl=args.max_kl,
        threads=args.threads,
        force=args.force,
    )
    print(table(bundle))
    print(f"\ntry it: stem-edge generate {args.out} -p 'Once upon a time'")
    return 0

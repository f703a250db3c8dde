"""The command `stem-edge prepare`: repack the weights for this processor, for faster loads."""

from __future__ import annotations

import argparse
import json

import msgspec

from stem_edge.bundle.footprint import footprint_of
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading
from stem_edge.errors import InputError
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import find_prepared
from stem_edge.runtime.backends.onnxruntime.prepared.preparing import make
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import open_or_make
from stem_edge.shown import format_size

DESCRIPTION = """\
Rearrange a bundle's backbone for this processor now, and keep the result in
the user's cache folder. Later loads map it: they are faster, and the system
can take back the memory of the weights. The first load of a large bundle does
the same. Preparing needs about twice the size of the weights on disk."""

EPILOG = """\
example:
  stem-edge prepare model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add_loading(parser, "tables", "cache_dir", "threads", "kv")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    options = LoadOptions(tables=args.tables, threads=args.threads)
    bundle = open_or_make(args.bundle, options)
    if bundle.manifest.backbone is None:
        raise InputError(
            f"{args.bundle}: no backbone for onnxruntime, and one for ggml needs no preparing; "
            "load it as it is"
        )
    kv = footprint_of(bundle.manifest).with_kv(args.kv).kv
    found = find_prepared(bundle, args.cache_dir, kv)
    folder, record = found or make(bundle, args.cache_dir, options.cpus, kv=kv)
    if args.json:
        print(json.dumps({"folder": str(folder), **msgspec.to_builtins(record)}, indent=1))
        return 0
    size = format_size(sum(nbytes for nbytes, *_ in record.files.values()))
    print(f"{folder}: {size}, {'there already' if found else 'made'}")
    return 0

"""The command `stem-edge prepare`."""

from __future__ import annotations

import argparse
import json

import msgspec

from stem_edge.bundle.manifest import open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backends.onnxruntime.prepacked import find, make
from stem_edge.system.memory import usable_cpus
from stem_edge.units import format_size

DESCRIPTION = """\
Rearrange a bundle's backbone for this processor and keep it in the user's cache folder, where later
loads map it: they are faster, and the weights take no memory that the system cannot take back. The
first load of a large bundle does this by itself. Takes the memory of the weights once, and about
twice their size on disk. Also measures whether the prefill graph is the faster one for prompts."""

EPILOG = """\
examples:
  stem-edge prepare model
  stem-edge cache                 what is kept, and what is old"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.commands.main.Command."""
    parser.epilog = EPILOG
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    parser.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache folder")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (the CPUs it may use)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """See stem_edge.commands.main.Command."""
    bundle = open_bundle(args.bundle)
    if bundle.manifest.backbone is None:
        raise InputError(
            f"{args.bundle}: no backbone for onnxruntime; ggml uses weights as they are in the file, "
            "and needs no preparing"
        )
    found = find(bundle, args.cache_dir)
    folder, record = found or make(bundle, args.cache_dir, args.threads or usable_cpus())
    if args.json:
        print(json.dumps({"folder": str(folder), **msgspec.to_builtins(record)}, indent=1))
        return 0
    size = format_size(sum(nbytes for nbytes, _ in record.files.values()))
    print(f"{folder}: {size}, {'there already' if found else 'made'}")
    if record.prefill is not None:
        rates = ", ".join(f"{name} graph {s * 1e3:.0f} ms" for name, s in record.seconds.items())
        print(
            f"a prompt chunk takes: {rates}; prompts go through the faster one, where it is exact"
        )
    return 0

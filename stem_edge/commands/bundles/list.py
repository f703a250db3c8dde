"""The command `stem-edge list`."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import Any

from stem_edge.bundle.hub.kept import kept_bundles
from stem_edge.bundle.manifest import open_manifest
from stem_edge.errors import BundleError
from stem_edge.files.names import cache_folder
from stem_edge.shown import format_size, printable

DESCRIPTION = """\
List the models on this machine: bundles made of checkpoints, and bundles
fetched from a hub. Every command that takes a bundle takes their names."""

EPILOG = """\
examples:
  stem-edge list
  stem-edge run NAME
  stem-edge rm NAME"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    models: list[dict[str, Any]] = []
    for name, place, folder in kept_bundles():
        with suppress(BundleError):  # what other programs keep
            nbytes = sum(file.nbytes for file in open_manifest(folder).files.values())
            models.append({"name": name, "nbytes": nbytes, "place": place})
    if args.json:
        print(json.dumps(models, indent=1))
        return 0
    widest = max((len(model["name"]) for model in models), default=0)
    for model in models:
        shown = f"{model['name']:{widest}}  {format_size(model['nbytes']):>9}  {model['place']}"
        print(printable(shown))
    if not models:
        print("no models are kept; fetch one with: stem-edge run hf:org/name")
    root = cache_folder(None)
    nbytes = sum(path.lstat().st_size for path in root.rglob("*"))
    what = f"all of {root} ({format_size(nbytes)}, with copies prepared for this processor)"
    print(printable(f"{what} can be deleted: what is needed is made again"))
    return 0

"""The command `stem-edge list`: list the bundles on this machine."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import Any

from stem_edge.bundle.footprint import footprint_of
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
        with suppress(BundleError):  # a manifest of another version or program
            manifest = open_manifest(folder)
            sizes = {"nbytes": sum(file.nbytes for file in manifest.files.values())}
            sizes["prepared_nbytes"] = footprint_of(manifest).prepared_nbytes
            models.append({"name": name, **sizes, "place": place})
    if args.json:
        print(json.dumps(models, indent=1))
        return 0
    widest = max((len(model["name"]) for model in models), default=0)
    for model in models:
        prepared = model["prepared_nbytes"]
        more = f"+ about {format_size(prepared)} prepared" if prepared else ""
        shown = f"{model['name']:{widest}}  {format_size(model['nbytes']):>9} {more:25}"
        print(printable(f"{shown}  {model['place']}"))
    if not models:
        print("no models are stored; get one with: stem-edge run FILE.gguf, or hf:org/name")
    root = cache_folder(None)
    nbytes = 0
    for path in root.rglob("*"):
        with suppress(OSError):  # another command may remove it meanwhile
            nbytes += path.lstat().st_size
    what = f"all of {root} ({format_size(nbytes)}, with copies prepared for this processor)"
    print(printable(f"{what} can be deleted: what is needed is made again"))
    return 0

"""The command `stem-edge rm`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stem_edge.commands.bundles.cache import belonging, entries, remove_entries
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.hub import PREFIX
from stem_edge.hub.fetch import cache
from stem_edge.hub.kept import Kept, kept_bundles, named
from stem_edge.shown import printable
from stem_edge.system.user_folder import cache_folder

DESCRIPTION = """\
Remove models that this machine keeps, with all that was prepared for them. A checkpoint that a bundle
was made of stays where it is. A model that a process uses stays, too."""

EPILOG = """\
examples:
  stem-edge list
  stem-edge rm my-model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="as stem-edge list shows it")


def run(args: argparse.Namespace) -> int:
    for kept in [_find(name) for name in args.names]:
        _remove(kept)
        print(printable(f"removed {kept.name} ({kept.place})"))
    return 0


def _find(name: str) -> Kept:
    """Return the model of a name, or of the place that tells apart several of one name."""
    place = str(Path(name).absolute())
    kept = next((each for each in kept_bundles() if each.place in (name, place)), None) or named(
        name
    )
    if kept is None:
        raise InputError(f"no kept model is called {name!r}; stem-edge list shows all")
    return kept


def _remove(kept: Kept) -> None:
    """Delete a bundle, and what was prepared for it. Raises StemEdgeError."""
    on_hub = kept.place.startswith(PREFIX)
    folder = kept.folder if on_hub else kept.folder.parent
    chosen = belonging(list(entries(cache_folder(None))), folder)
    if len(remove_entries(chosen)) < len(chosen):
        raise StemEdgeError(f"{kept.name}: a process uses it; end that first")
    if on_hub:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(cache()).delete_revisions(kept.folder.name).execute()

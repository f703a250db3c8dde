"""The command `stem-edge rm`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stem_edge.commands.bundles.entries import Entry, belonging, entries
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.files.names import cache_folder
from stem_edge.hub import PREFIX
from stem_edge.hub.fetch import cache
from stem_edge.hub.kept import Kept, kept_bundles, named
from stem_edge.shown import printable

DESCRIPTION = """\
Remove models with everything that was prepared for them, or other entries of
the cache folder. Checkpoints stay."""

EPILOG = """\
examples:
  stem-edge list --all
  stem-edge rm my-model
  stem-edge rm 6f8dcde149d0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "name of a model or an entry, as stem-edge list --all shows it, or a model's place"
    parser.add_argument("names", metavar="NAME", nargs="+", help=what)


def run(args: argparse.Namespace) -> int:
    for name in args.names:
        found = list(entries(cache_folder(None)))
        cached = [entry for entry in found if name == entry.path.name]
        if cached:
            _remove(
                name, [*cached, *(e for c in cached for e in belonging(found, c.path) if e != c)]
            )
            print(printable(f"removed {name}"))
        else:
            kept = _find(name)
            _remove_model(kept, found)
            print(printable(f"removed {kept.name} ({kept.place})"))
    return 0


def _find(name: str) -> Kept:
    """Return the model of a name, or of the place that tells apart several of one name."""
    place = str(Path(name).absolute())
    kept = next((each for each in kept_bundles() if each.place in (name, place)), None) or named(
        name
    )
    if kept is None:
        raise InputError(
            f"no model or entry is called {name!r}; give one that stem-edge list --all shows"
        )
    return kept


def _remove_model(kept: Kept, found: list[Entry]) -> None:
    """Delete a bundle, and what was prepared for it. Raises StemEdgeError."""
    on_hub = kept.place.startswith(PREFIX)
    _remove(kept.name, belonging(found, kept.folder if on_hub else kept.folder.parent))
    if on_hub:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(cache()).delete_revisions(kept.folder.name).execute()


def _remove(name: str, chosen: list[Entry]) -> None:
    """Delete entries, the first one first. Raises StemEdgeError if a process makes one."""
    if not all(entry.remove() for entry in chosen):
        raise StemEdgeError(f"{name}: a process makes it; end that first")

"""The command `stem-edge rm`: delete bundles and their cached weights."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from stem_edge.bundle.fetched import CHECKED, marked_folder
from stem_edge.bundle.hub import PREFIX
from stem_edge.bundle.hub.fetch import cache
from stem_edge.bundle.hub.kept import Kept, kept_bundles, named
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.files.names import KEY_CHARS, PREPARED, cache_folder
from stem_edge.files.trees import remove_tree
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import read_prepared
from stem_edge.runtime.backends.onnxruntime.saved_graphs import GRAPHS
from stem_edge.runtime.first_load import made
from stem_edge.runtime.text.kept import TOKENIZERS
from stem_edge.shown import printable

KEY = re.compile(rf"[0-9a-f]{{{KEY_CHARS}}}(-[0-9a-f]{{{KEY_CHARS}}})?")
DESCRIPTION = """\
Remove models and what was prepared for them. Checkpoints and exports stay."""

EPILOG = """\
examples:
  stem-edge list
  stem-edge rm my-model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "name of a model, as stem-edge list shows it, or a bundle"
    parser.add_argument("names", metavar="NAME", nargs="+", help=what)


def run(args: argparse.Namespace) -> int:
    for name in args.names:
        kept = _find(name)
        try:
            _remove(kept)
        except OSError as error:
            raise StemEdgeError(
                f"{error.filename or kept.folder}: cannot remove ({error.strerror}); check its "
                "permissions, and try again"
            ) from error
        print(printable(f"removed {kept.name} ({kept.place})"))
    return 0


def _find(name: str) -> Kept:
    """Find a bundle by short name, folder, or hub name with commit. Raises InputError if unknown."""
    place = str(Path(name).absolute())
    for kept in kept_bundles():
        if kept.place in (name, place):
            return kept
    if os.path.exists(Path(name) / MANIFEST):  # noqa: PTH110 - Path.exists raises for long names
        return Kept(f"what was prepared for {name}", place, Path(name))
    if (found := named(name)) is None:
        raise InputError(f"no model is called {name!r}; give one that stem-edge list shows")
    return found


def _remove(kept: Kept) -> None:
    """Delete a cached bundle and its repacked weights. Raises StemEdgeError if it is being made."""
    within = f"{kept.folder.resolve()}{os.sep}"
    if kept.place.startswith(PREFIX):
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(cache()).delete_revisions(kept.folder.name).execute()
    elif kept in kept_bundles() and not made.remove(kept.folder.parent):
        raise StemEdgeError(f"{kept.name}: a process makes it; end that first")
    root = cache_folder(None)
    # Links lead elsewhere, and entries with other names belong to other programs.
    ours = [p for p in root.glob("*/*") if KEY.fullmatch(p.name) and not p.is_symlink()]
    for path in ours:
        if path.parent.name == PREPARED:
            found = read_prepared(path)
            if found is not None and f"{found.record.bundle}{os.sep}".startswith(within):
                remove_tree(path, path.parent)
        elif (
            path.parent.name == CHECKED and f"{marked_folder(path)}{os.sep}".startswith(within)
        ) or path.parent.name in (TOKENIZERS, GRAPHS):
            path.unlink(missing_ok=True)  # another rm may be faster

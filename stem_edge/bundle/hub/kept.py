"""Bundles that are cached on this machine, and their short names.

Bundles made from checkpoints are in the user's cache folder, bundles from a hub in the hub's cache. A bundle's
short name is the name of its folder, or its name on the hub without the organization. There is no index file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle.hub.fetch import MAIN, cache, kept_commit
from stem_edge.bundle.hub.names import REPOSITORIES, name_of
from stem_edge.errors import InputError
from stem_edge.files.hub_links import SNAPSHOTS
from stem_edge.files.names import cache_folder
from stem_edge.shown import one_line

MADE = "made"  # folder of bundles made from checkpoints, in the user's cache folder
KEY_CHARS = 12  # few, because people type them
KEY = re.compile(rf"[0-9a-f]{{{KEY_CHARS}}}")  # names of the folders in MADE
MARK = "manifest.json"


class Kept(NamedTuple):
    """A bundle cached in `folder`. `place` is the folder, or a name on the hub with a commit."""

    name: str
    place: str
    folder: Path


def kept_bundles() -> Iterator[Kept]:
    """Yield the bundles in the user's cache folder, then the bundles in the hub's cache."""
    with suppress(InputError):  # a user without a home
        for mark in sorted((cache_folder(None) / MADE).glob(f"*/*/{MARK}")):
            if KEY.fullmatch(mark.parent.parent.name):
                yield Kept(mark.parent.name, str(mark.parent), mark.parent)
    for repository in sorted(cache().glob(f"{REPOSITORIES}*")):
        commit = kept_commit(repository / "refs" / MAIN) or "*"
        for mark in sorted((repository / SNAPSHOTS).glob(f"{commit}/{MARK}")):
            if (name := name_of(mark.parent)) is not None:
                yield Kept(name.repository.rpartition("/")[2], str(name), mark.parent)


def named(name: str) -> Kept | None:
    """Return the cached bundle with this short name; None if there is no such bundle.

    Raises InputError if several bundles have this name, or if only similar names exist.
    """
    bundles = [*kept_bundles()]
    found = [bundle for bundle in bundles if bundle.name == name]
    if len(found) > 1:
        places = ", ".join(bundle.place for bundle in found)
        raise InputError(f"{len(found)} kept models are called {name}; give one as {places}")
    names = [bundle.name for bundle in bundles]
    near = [n for n in names if name and n.startswith(name)] or get_close_matches(name, names, 1)
    if near and not found:
        raise InputError(
            f"{one_line(name)}: no such folder or model; did you mean {near[0]}? else give one that "
            "stem-edge list shows"
        )
    return found[0] if found else None

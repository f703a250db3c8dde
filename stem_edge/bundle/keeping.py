"""Keeping of verdicts, and of the places of files that were hashed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.verdicts import DOUBT_SECONDS, FORMAT, Verdict, Verdicts
from stem_edge.errors import BundleError
from stem_edge.files.hashing import sha256_of
from stem_edge.files.plain_files import damaged
from stem_edge.files.whole_file import write_whole
from stem_edge.graph.formats import EngineName


def keep_verdict(
    verdicts: Verdicts,
    reason: str = "",
    *,
    certain: bool = True,
    prefill_from_decode: float | None = None,
) -> Verdict:
    """Keep a good verdict, or a bad one with its reason, if the folder can be written."""
    until = None if certain else int(time.time()) + DOUBT_SECONDS
    found = {"reason": reason, "until": until, "prefill_from_decode": prefill_from_decode}
    return _keep(verdicts, verdicts.verdict_file, **found)


def check_place(
    verdicts: Verdicts,
    progress: Callable[[int], object] = lambda nbytes: None,
    *,
    anew: bool = False,
) -> None:
    """Hash the files unless that was done before. Raises BundleError naming a wrong one.

    progress: called with the number of bytes just hashed. anew: hash them in any case.
    """
    if verdicts.place_is_known() and not anew:
        return
    for name in verdicts.hashed_files():
        path, entry = verdicts.bundle.file(name), verdicts.bundle.manifest.files[name]
        found = sha256_of(path, entry.nbytes, progress)
        if found != entry.sha256:
            raise damaged(path, f"sha256 is {found}, expected {entry.sha256}")
    _keep(verdicts, verdicts.place_file)


def _keep(verdicts: Verdicts, path: Path, **found: Any) -> Verdict:
    """Write atomically; if that fails there is another trial next time."""
    verdict = Verdict(format=FORMAT, bundle=verdicts.path, engine=verdicts.engine, **found)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(verdict))
    return verdict


def keep_good(bundle: Bundle, engine: EngineName, cache_dir: str | Path | None = None) -> None:
    """Keep a good verdict on a bundle that has just been run in this process."""
    measured = bundle.manifest.reports[engine].prefill_from_decode
    with contextlib.suppress(BundleError):
        keep_verdict(Verdicts(bundle, engine, cache_dir), prefill_from_decode=measured)

"""The safety check of a bundle: everything that can be checked without running it.

A bundle counts as safe if every file is as exported, and none contains anything that could mislead the native
libraries that read it. That is no proof, and it says nothing about the text that the model will write.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import msgspec

from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import (
    MANIFEST,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    is_shard,
    open_manifest,
)
from stem_edge.bundle.opening import Bundle, bundle_folder, open_bundle
from stem_edge.errors import BundleError, StemEdgeError
from stem_edge.files import disk
from stem_edge.progress import Progress
from stem_edge.runtime.first_load.table_check import check_tables
from stem_edge.runtime.rows.remote import printable_url
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.shown import format_size
from stem_edge.text.chat_template import ChatTemplate, has_template

# Suffixes of files that a system or an interpreter runs.
CODE = {".so", ".dll", ".dylib", ".exe", ".py", ".pyc", ".pyd", ".pth", ".sh", ".bat", ".ps1"}
Check: TypeAlias = tuple[str, Callable[[], object]]  # what holds, and a check that raises if not
OK = "ok"
STRAY = "a link, a device or something executable; stem-edge does not touch it, remove it"
COPY_AGAIN = "copy the bundle again from its source or export it again"


class Safety(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the safety check of a bundle."""

    files: dict[str, str]  # name -> "ok" or what is wrong
    reasons: list[str]  # why it is not safe, a sentence each; empty if it is
    checked: list[str]  # checks that it passed
    advice: str = ""  # what to do about the reasons

    @property
    def safe(self) -> bool:
        """True if no check failed."""
        return not self.reasons


def check_safety(
    path: str | Path,
    tables: str | None = None,
) -> Safety:
    """Check all files of a bundle.

    tables: URL of its tables, if their shards are elsewhere; they are then left out, and the result says so. Raises BundleError if there is no such folder.
    """
    root = bundle_folder(path, shards=tables is None)
    try:
        manifest = open_manifest(root)
    except BundleError as error:
        if not root.is_dir():
            raise
        reason = _within(root, error)
        return Safety(files={MANIFEST: reason}, reasons=[reason], checked=[], advice=COPY_AGAIN)
    far = {n for n in manifest.files if tables is not None and is_shard(n)}
    here = {n: e.nbytes for n, e in manifest.files.items() if n not in far}
    twice = sum(nbytes for n, nbytes in here.items() if n.startswith(f"{TABLES}/"))
    with Progress(sum(here.values()) + twice, "verifying", None) as bar:
        files = verify(root, bar.advance, shards=tables is None)
        beside = files.keys() - manifest.files.keys()
        # Harmless files are ignored, because model hubs add READMEs, and systems their own files.
        ignored = {name for name in beside if _is_harmless(root / name)}
        strays = beside - ignored
        files |= {name: f"{files[name]}, and {STRAY}" for name in strays}
        wrong = {n: found for n, found in files.items() if found != OK and n not in ignored}
        reasons = [f"{name}: {found}" for name, found in wrong.items()]
        if wrong.keys() - strays:  # further checks of a damaged bundle are not needed
            return Safety(files=files, reasons=reasons, checked=[], advice=COPY_AGAIN)
        checked = [f"{len(here)} files, {format_size(sum(here.values()))}, as exported"]
        if tables is not None:
            checked.append(
                f"without the {len(far)} shards at {printable_url(tables)}, which were not hashed"
            )
        checked += [f"{len(ignored)} other files, which nothing reads"] if ignored else []
        try:
            bundle = open_bundle(root, tables)
        except BundleError as error:
            bad = [_within(root, error)]
        else:
            bad = _wrong(root, _parts(bundle, bar.advance), checked)
    advice = COPY_AGAIN if bad else "remove what is not part of the bundle" if strays else ""
    return Safety(files=files, reasons=bad + reasons, checked=checked, advice=advice)


def _parts(bundle: Bundle, advance: Callable[[int], object]) -> Iterator[Check]:
    """Yield checks of what is in the files."""
    model = bundle.manifest.model
    if bundle.manifest.table_format is not None and bundle.tables is None:
        yield f"{model.records:,} records", partial(check_tables, bundle, advance)
    tokenizer, config = bundle.file(TOKENIZER), bundle.file(TOKENIZER_CONFIG)
    yield "a tokenizer that the library reads", partial(TextCodec, tokenizer, model.vocab_size)
    if _has_chat_template(config):
        yield "chat template works", lambda: ChatTemplate(config).close()
    else:
        yield "no chat template", lambda: None


def _wrong(root: Path, parts: Iterable[Check], checked: list[str]) -> list[str]:
    """Run checks; append those that pass to `checked`, and return the failures."""
    bad = []
    for right, check in parts:
        try:
            check()
            checked.append(right)
        except StemEdgeError as error:
            bad.append(_within(root, error))
    return bad


def _has_chat_template(path: Path) -> bool:
    try:
        return has_template(path)
    except BundleError:  # a damaged file, which ChatTemplate reports
        return True


def _is_harmless(path: Path) -> bool:
    """Return whether a file beside the bundle's own is a plain file and not executable."""
    suffixes = {suffix.lower() for suffix in PurePosixPath(path.name).suffixes}
    with contextlib.suppress(OSError):  # raised if the file has been removed meanwhile
        mode = disk.status(path).st_mode
        # Windows has no such bits, so there only suffixes tell.
        executable = os.name == "posix" and mode & 0o111
        return stat.S_ISREG(mode) and not executable and not suffixes & CODE
    return False


def _within(root: Path, error: StemEdgeError) -> str:
    """Return an error's message with paths relative to the bundle."""
    text = " ".join(str(error).split())
    return text.removeprefix(f"{root}: ").removeprefix(f"{root}{os.sep}")

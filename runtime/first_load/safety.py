"""The safety check of a bundle: every check that does not run the model.

A bundle counts as safe if every file is as exported, and no file contains anything that could mislead the
native libraries that read it. This is no proof, and says nothing about the text that the model will write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
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
from stem_edge.progress import Progress
from stem_edge.runtime.backends.onnxruntime.providers.graphs import separate
from stem_edge.runtime.rows.remote import printable_url
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.shown import format_size
from stem_edge.text.chat_template import ChatTemplate, has_template

Check: TypeAlias = tuple[str, Callable[[], object]]  # what holds, and a check that raises if not
OK = "ok"


class Safety(msgspec.Struct, frozen=True, kw_only=True):
    files: dict[str, str]  # name -> "ok" or what is wrong
    reasons: list[str]  # why the bundle is not safe, a sentence each; empty if it is safe
    checked: list[str]  # checks that it passed

    @property
    def safe(self) -> bool:
        return not self.reasons


def check_safety(
    path: str | Path,
    tables: str | None = None,
) -> Safety:
    """Check all files that the manifest lists. Loading never reads other files of a bundle.

    tables: URL of the bundle's table shards, if they are not in its folder. Remote shards are not checked, and
    the result says so. Raises BundleError if the bundle's folder does not exist.
    """
    root = bundle_folder(path, shards=tables is None)
    try:
        manifest = open_manifest(root)
    except BundleError as error:
        if not root.is_dir():
            raise
        reason = _within(root, error)
        return Safety(files={MANIFEST: reason}, reasons=[reason], checked=[])
    far = {n for n in manifest.files if tables is not None and is_shard(n)}
    nbytes = sum(entry.nbytes for n, entry in manifest.files.items() if n not in far)
    with Progress(nbytes, "verifying", None) as bar:
        files = verify(root, bar.advance, shards=tables is None)
    own = {n: found for n, found in files.items() if n in manifest.files}
    if wrong := [f"{name}: {found}" for name, found in own.items() if found != OK]:
        return Safety(files=files, reasons=wrong, checked=[])
    checked = [f"{len(own)} files, {format_size(nbytes)}, as exported"]
    if tables is not None:
        checked.append(
            f"without the {len(far)} shards at {printable_url(tables)}, which were not hashed"
        )
    if others := len(files) - len(own):
        checked.append(f"{others} other files, which nothing reads")
    try:
        bundle = open_bundle(root, tables)
    except BundleError as error:
        bad = [_within(root, error)]
    else:
        bad = _wrong(root, _parts(bundle), checked)
    return Safety(files=files, reasons=bad, checked=checked)


def _parts(bundle: Bundle) -> Iterator[Check]:
    """Yield a description and a check function for each part of the bundle."""
    if bundle.manifest.backbone is not None:
        prefill = bundle.manifest.has_prefill
        yield "weights of the model", lambda: separate(bundle, prefill=prefill, kv="fp32")
    tokenizer, config = bundle.file(TOKENIZER), bundle.file(TOKENIZER_CONFIG)
    size, format = bundle.manifest.model.vocab_size, bundle.manifest.table_format
    if format is not None and bundle.tables is None:
        tables = bundle.file(TABLES)
        yield f"{format.tables.records:,} records", lambda: open_store(tables, format).close()
    yield "a tokenizer that the library reads", partial(TextCodec, tokenizer, size)
    if _has_chat_template(config):
        yield "chat template works", lambda: ChatTemplate(config).close()
    else:
        yield "no chat template", lambda: None


def _wrong(root: Path, parts: Iterable[Check], checked: list[str]) -> list[str]:
    """Run checks; append descriptions of passed ones to `checked`, and return error messages."""
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


def _within(root: Path, error: StemEdgeError) -> str:
    """Return an error's message with paths relative to the bundle's folder."""
    text = " ".join(str(error).split())
    return text.removeprefix(f"{root}: ").removeprefix(f"{root}{os.sep}")

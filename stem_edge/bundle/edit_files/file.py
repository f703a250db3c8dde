"""Edits, and the format of edit files. An edit makes tokens use table rows other than their own.

An edit file is JSON: the fields of the edit, and `format_version`. An edit contains the hash of the tables that
it was made for, and fits no other tables. Nothing in an edit is executed. Unknown fields are errors.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from stem_edge.bundle.checksums import tables_hash
from stem_edge.bundle.edit_files.schemes import Scheme
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import EditError, InputError
from stem_edge.files import disk
from stem_edge.files.disk import write_whole
from stem_edge.files.plain_files import decode_json
from stem_edge.shown import one_line, shown

FORMAT_VERSION = 2
SUFFIX = ".edit"
MAX_NBYTES = 1 << 20  # an edit of the longest texts, for every layer, has 60 kB
Scope = Literal["positions", "everywhere"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_TEXT = 4096  # characters of a source or target
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
# Checked by itself, because msgspec does not require the tag of an Edit.
Versioned = msgspec.defstruct("Versioned", [("format_version", int)])


class Edit(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="format_version",
    tag=FORMAT_VERSION,
):
    """Makes the tokens of one text look up the table rows of another text; made by make_edit."""

    # hash of the tables, see tables_id
    made_for: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    source: Name  # text whose tokens use other rows
    target: Name  # text whose rows they use
    scheme: Scheme = "auto"  # which token of the target each token of the source uses
    pad: Index | None = None  # id of the token that fills up a shorter target
    layers: tuple[Index, ...]  # STEM layers whose rows the edit changes, ascending
    # "positions": only where the source text occurs. "everywhere": wherever its tokens occur.
    scope: Scope = "positions"

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {shown(self.layers)} are not ascending without repeats")

    def save(self, path: str | Path) -> None:
        """Write the edit to a file atomically, replacing an older one.

        Raises InputError if the file cannot be written, or if read_edit would refuse it.
        """
        try:
            data = encode_edit(self)
            msgspec.json.decode(data, type=Edit)
            write_whole(Path(path), data, durable=True)
        except (OSError, ValueError) as error:  # errors of msgspec are ValueErrors
            raise InputError(
                f"{path}: cannot write this edit ({getattr(error, 'strerror', None) or one_line(error)}); "
                "choose another path or edit"
            ) from error


def encode_edit(edit: Edit) -> bytes:
    """Return the bytes of an edit's file; equal edits give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(edit, order="sorted"), indent=1) + b"\n"


def read_edit(path: str | Path) -> Edit:
    """Read an edit from a file. Raises EditError if it is missing, damaged or not an edit."""
    path = Path(path)
    try:
        # A link to an edit is fine, but must be resolved because read_file does not follow it.
        data = disk.read_file(path.resolve(), MAX_NBYTES)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in a path, links in a circle
        raise EditError(
            f"{path}: cannot read ({getattr(error, 'strerror', None) or error}); make an edit with: "
            "stem-edge edit BUNDLE --source TEXT --target TEXT -o FILE"
        ) from error
    try:
        decode_json(data, Versioned, MAX_NBYTES)
        return msgspec.json.decode(data, type=Edit)
    except (ValueError, RecursionError) as error:
        raise EditError(
            f"{path}: not an edit of format {FORMAT_VERSION} ({one_line(error)}); make it again "
            "with stem-edge edit, or upgrade stem-edge"
        ) from error


def tables_id(bundle: Bundle) -> str:
    """Return the sha256 of a bundle's tables and tokenizer, by which edits recognize a bundle.

    An edit also fits bundles that differ only in their backbones (types of matrices, engine).
    """
    files = bundle.manifest.files
    return hashlib.sha256(f"{tables_hash(files)} {files[TOKENIZER].sha256}".encode()).hexdigest()


def open_edit(bundle: Bundle, given: Edit | str | Path) -> Edit:
    """Return an edit after checking that it fits a bundle.

    given: the edit or its file's path (.edit may be left out). Raises EditError, InputError.
    """
    if isinstance(given, Edit):
        check_edit(given, bundle)
        return given
    if not isinstance(given, str | Path):
        raise InputError(
            f"an edit is given as {type(given).__name__}; expected an Edit or the path of an edit "
            "file, and several edits as separate arguments"
        )
    path, whole = Path(given), f"{given}{SUFFIX}"
    if path.name and path.suffix != SUFFIX and os.path.isfile(whole):  # noqa: PTH113  (never raises)
        path = Path(whole)
    edit = read_edit(path)
    try:
        check_edit(edit, bundle)
    except EditError as error:
        raise EditError(f"{path}: {error}") from error
    return edit


def check_edit(edit: Edit, bundle: Bundle) -> None:
    """Raise EditError unless an edit was made for this bundle and fits it."""
    manifest = bundle.manifest
    if edit.made_for != tables_id(bundle):
        raise EditError(
            f"this edit was made for other tables ({edit.made_for[:8]}...) than those of "
            f"{bundle.path} ({tables_id(bundle)[:8]}...); make it again for this bundle"
        )
    # Files that this package wrote pass the rest, but a forged one could name impossible rows.
    layout, model = manifest.tables, manifest.model
    unknown = set(edit.layers) - set(layout.layers if layout else ())
    if layout is None or unknown:
        raise EditError(
            f"this edit names layer {min(unknown)}, which is not a STEM layer of {bundle.path}; "
            "make it again for this bundle"
        )
    if (pad := edit.pad) is not None and pad >= model.vocab_size:
        raise EditError(f"this edit names token {pad}; expected 0 to {model.vocab_size - 1}")

"""Edits and the files that hold them: what tokens look up instead of their own rows.

An edit file is JSON, `{"format_version": 1, "sha256": ..., "edit": {...}}`, with the checksum over
the bytes of the edit as they stand in the file. It names the tables that it was made for and is
refused by others. Nothing in it is run; unknown fields are refused.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from stem_edge.bundle.manifest import TOKENIZER, Bundle, tables_hash
from stem_edge.edits.schemes import Scheme
from stem_edge.errors import EditError, InputError
from stem_edge.files import disk
from stem_edge.files.strict_json import check_json, one_line
from stem_edge.files.whole_file import write_whole
from stem_edge.tables.lookup import is_row

FORMAT_VERSION = 1
SUFFIX = ".edit"
MOST_SHOWN = 8  # layers in a message
MAX_NBYTES = 1 << 28
MAX_VALUES = 1 << 22  # in a file: each takes some hundred bytes when it is read
# Rows, which are most of a file: nothing in them can be anything but a row.
_PACKED = re.compile(rb'"[0-9A-Za-z+/]{64,}+={0,2}"')
Scope = Literal["positions", "everywhere"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_TEXT = 4096  # characters of a source or target
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]


class Replacement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="replacement"
):
    """A text whose tokens look up the rows of another text's tokens."""

    source: Name
    target: Name
    scheme: Scheme = "auto"
    subset: Indices | None = None  # of scheme subset: which target tokens
    pad: Index | None = None  # the padding token


class NewRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="rows"):
    """Tokens whose rows have other values."""

    # token id -> a packed row for each of Edit.layers
    rows: dict[Index, tuple[bytes, ...]]


Change: TypeAlias = Replacement | NewRows


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One edit. Make it with stem_edge.make_edit or stem_edge.make_row_edit."""

    made_for: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # tables_id
    change: Change
    layers: Indices  # STEM layers that it is in, ascending
    # "positions": where the source is in the prompt. "everywhere": whenever the token comes.
    scope: Scope = "positions"

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            shown = ",".join(map(str, self.layers[:MOST_SHOWN]))
            raise ValueError(f"layers {shown or 'none'} are not ascending without repeats")
        if isinstance(self.change, NewRows):
            if self.scope != "everywhere":
                raise ValueError("new rows are of tokens, so their scope is everywhere")
            if not self.change.rows:
                raise ValueError("no token has new rows")
            for token, rows in self.change.rows.items():
                if len(rows) != len(self.layers):
                    raise ValueError(
                        f"token {token} has {len(rows)} rows, in {len(self.layers)} layers"
                    )

    def save(self, path: str | Path) -> None:
        """Write the edit into a file, whole or not at all; an older one is replaced.

        Raises InputError if that cannot be written, or not be read again.
        """
        path, data = Path(path), encode_edit(self)
        if len(data) > MAX_NBYTES:
            raise InputError(
                f"{path}: this edit is {len(data)} bytes, above {MAX_NBYTES}; make several of it"
            )
        try:
            write_whole(path, data, durable=True)
        except OSError as error:
            raise InputError(
                f"{path}: cannot write this edit ({error.strerror}); choose another place"
            ) from error


class _File(msgspec.Struct):
    """What every format has; its own fields are left to a newer one."""

    format_version: int = 0
    sha256: str = ""
    edit: msgspec.Raw = msgspec.Raw(b"")


class _StrictFile(_File, forbid_unknown_fields=True):
    pass


def encode_edit(edit: Edit) -> bytes:
    """Bytes of the file; the same edit gives the same bytes."""
    plain = msgspec.to_builtins(edit, str_keys=True)  # only names can be sorted, not token ids
    content = msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1)
    checksum = hashlib.sha256(content).hexdigest()
    head = f'{{"format_version": {FORMAT_VERSION}, "sha256": "{checksum}", "edit": '
    return head.encode() + content + b"}\n"


def read_edit(path: str | Path) -> Edit:
    """The edit in a file. Raises EditError for a file that is missing, damaged or of another kind."""
    path = Path(path)
    data = _read(path)
    try:
        _check_json(data)
        file = msgspec.json.decode(data, type=_File)
        number = file.format_version
        if not bytes(file.edit):
            raise ValueError("there is no edit in it")
        if number > FORMAT_VERSION:
            raise EditError(
                f"{path}: edit format {number} is newer than this stem-edge reads "
                f"({FORMAT_VERSION}); upgrade stem-edge"
            )
        if number < FORMAT_VERSION:
            raise ValueError(f"format_version is {number}")
        file = msgspec.json.decode(data, type=_StrictFile)
        found = hashlib.sha256(bytes(file.edit)).hexdigest()
        if found != file.sha256:
            raise ValueError(f"its sha256 is {found[:8]}..., expected {file.sha256[:8]}...")
        return msgspec.json.decode(file.edit, type=Edit)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise EditError(
            f"{path}: not an edit of format {FORMAT_VERSION} ({one_line(error)}); make it again with "
            "stem-edge edit"
        ) from error


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise EditError(f"{path}: no such edit file; make one with: stem-edge edit BUNDLE")
        if path.stat().st_size <= MAX_NBYTES:
            data = disk.read_file(path.resolve(), MAX_NBYTES)  # a link may lead to an edit
            if len(data) <= MAX_NBYTES:
                return data
    except OSError as error:
        raise EditError(f"{path}: cannot read ({error.strerror}); check its permissions") from error
    raise EditError(f"{path}: larger than {MAX_NBYTES} bytes; not an edit: make it again")


def _check_json(data: bytes) -> None:
    """Raises ValueError for JSON that means two things, or that would fill the memory."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    msgspec.json.decode(data, type=msgspec.Raw)  # which is soon done with what is no JSON at all
    check_json(_PACKED.sub(b'""', data))


def tables_id(bundle: Bundle) -> str:
    """What an edit is made for: a sha256 of a bundle's tables and tokenizer.

    Bundles whose backbones alone differ (other types, another engine) share their edits.
    """
    files = bundle.manifest.files
    return hashlib.sha256(f"{tables_hash(files)} {files[TOKENIZER].sha256}".encode()).hexdigest()


def check_edit(edit: Edit, bundle: Bundle) -> None:
    """Raises EditError unless the edit was made for this bundle and fits it."""
    manifest = bundle.manifest
    if edit.made_for != tables_id(bundle):
        raise EditError(
            f"this edit was made for other tables ({edit.made_for[:8]}...) than those of "
            f"{bundle.path} ({tables_id(bundle)[:8]}...); make it again for this bundle"
        )
    # What follows cannot be in a file that this package wrote.
    layout, model = manifest.tables, manifest.model
    unknown = set(edit.layers) - set(layout.layers if layout else ())
    if layout is None or unknown:
        raise EditError(
            f"this edit is in layer {min(unknown)}, which is no STEM layer here; make it again for "
            "this bundle"
        )
    for token, rows in _rows(edit.change).items():
        if token >= model.vocab_size:
            raise EditError(f"this edit has token {token}; expected 0 to {model.vocab_size - 1}")
        if not all(is_row(layout, row) for row in rows):
            raise EditError(
                f"this edit has a row of token {token} that is none: expected {layout.row_nbytes} "
                "bytes of finite values; make it again"
            )


def _rows(change: Change) -> dict[int, tuple[bytes, ...]]:
    """Tokens that are named, and their new rows."""
    if isinstance(change, NewRows):
        return change.rows
    return {} if change.pad is None else {change.pad: ()}

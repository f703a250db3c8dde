"""Write and check the zarr.json files of a table store. Each has exactly one accepted form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stem_edge.files.plain_files import damaged, decode_json, read_plain
from stem_edge.shown import one_line

MAX_JSON_NBYTES = 1 << 20


F = TypeVar("F", bound=msgspec.Struct)


def array_document(
    shape: list[int], data_type: str, chunk_shape: list[int], codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
        "storage_transformers": [],
    }


def group_document(attribute: str, format: msgspec.Struct) -> dict[str, Any]:
    """Return the contents of a group's zarr.json, with `format` as an attribute."""
    attributes = {attribute: msgspec.to_builtins(format)}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def read_group(root: Path, attribute: str, kind: type[F]) -> F:
    """Read the format of a group from an attribute. Raises BundleError unless its zarr.json is as exported."""
    group = read_json(path := root / "zarr.json")
    with naming(path):
        format = msgspec.convert(group["attributes"][attribute], kind)
        compare(group, group_document(attribute, format))
    return format


def read_json(path: Path) -> dict[str, Any]:
    """Read a zarr.json as a dict. Raises BundleError."""
    data = read_plain(path, MAX_JSON_NBYTES, "description of tables")
    try:
        return decode_json(data, dict[str, Any], MAX_JSON_NBYTES)
    except ValueError as error:
        raise damaged(path, f"not a zarr.json ({error})") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that converts errors in its block to a BundleError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else one_line(error)
        raise damaged(path, f"not a table store of this format ({reason})") from error


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ValueError if two objects differ as JSON text, where 3 and 3.0 are not equal."""
    for field in sorted(found.keys() | expected.keys()):
        texts = [
            msgspec.json.encode(side.get(field), order="sorted").decode()
            for side in (found, expected)
        ]
        if texts[0] != texts[1]:
            raise ValueError(f"{field} is {one_line(texts[0])}, expected {texts[1]}")

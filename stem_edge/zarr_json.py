"""The zarr.json files of a table store: written in one way, and read only if they are just so."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.errors import BundleError

MAX_JSON_NBYTES = 1 << 20


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Bytes of a zarr.json."""
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2)


def array_document(
    shape: list[int], data_type: str, chunk: list[int], codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    """zarr.json of an array."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
        "storage_transformers": [],
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a zarr.json. Raises BundleError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MAX_JSON_NBYTES + 1)
        if len(data) > MAX_JSON_NBYTES:
            raise ValueError(f"larger than {MAX_JSON_NBYTES} bytes")
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); the bundle is incomplete: export it again"
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not a zarr.json ({error}); export the bundle again") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever the contents of this file make fail becomes one BundleError that names it."""
    try:
        yield
    except (msgspec.ValidationError, KeyError, TypeError, IndexError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(
            f"{path}: not a table store of this format ({reason}); export the bundle again"
        ) from error


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError if they differ; as JSON text, because Python holds 3 == 3.0."""
    for field in sorted(found.keys() | expected.keys()):
        texts = [
            msgspec.json.encode(side.get(field), order="sorted").decode()
            for side in (found, expected)
        ]
        if texts[0] != texts[1]:
            raise ValueError(f"{field} is {texts[0][:200]}, expected {texts[1]}")

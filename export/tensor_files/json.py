"""Reads JSON files of a checkpoint, and checks their size and the options in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stem_edge import shown as texts
from stem_edge.errors import CheckpointError
from stem_edge.files import disk
from stem_edge.limits import MAX_LAYERS, MAX_WIDTH

MAX_NBYTES = 1 << 24  # indexes of large models have a few megabytes
MOST_SHOWN = 8  # problems in a message
MAX_VALUES = 1 << 22  # limited, because a decoded value takes about a hundred bytes
# Options that are used as list sizes or divisors before ModelConfig checks them.
Layers: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Heads: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")


def read_json(path: Path, what: str, type: type[V], *, missing: str = "") -> V:
    """Decode a JSON file as `type`. Raises CheckpointError.

    what: name of the content for messages; missing: advice if there is no such file.
    """
    try:
        data = disk.read_file(path.resolve(), MAX_NBYTES)
        if len(data) > MAX_NBYTES:
            raise ValueError(f"larger than {MAX_NBYTES} bytes")
        check_json(data)
        return msgspec.json.decode(data, type=type)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no {path.name}; {missing or 'copy it, too'}"
        ) from None
    except (OSError, ValueError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not {what} ({reason_of(error)}); copy the file again from where the model "
            "was made"
        ) from error


def check_json(data: bytes) -> None:
    """Raise ValueError for JSON with more than MAX_VALUES values, which would fill the memory."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")


def read_options(
    path: Path,
    options: Mapping[str, object],
    type: type[T],
    *,
    expected: Mapping[str, tuple[object, ...]],
    ignored: Collection[str],
    advice: str,
) -> T:
    """Convert a trainer's options to `type`. Raises CheckpointError for unsupported options.

    expected: option -> its supported values; ignored: options that do not change the model; advice: what
    the user can do about an unsupported option. All other options must be off (null, False, 0, empty),
    because new options of a trainer are off by default.
    """
    for name, found in options.items():
        if name in ignored or name in type.__struct_fields__:
            continue
        wanted = "False" if isinstance(found, bool) else "off"
        fits = found is None
        if name in expected:
            wanted = " or ".join(map(repr, expected[name]))
            fits = any(isinstance(found, v.__class__) and found == v for v in expected[name])
        elif isinstance(found, bool | int | float | str | list | tuple | dict):
            fits = not found
        if not fits:
            raise CheckpointError(
                f"{path}: {one_line(name)} is {one_line(repr(found))}; expected {wanted}: {advice}"
            )
    return convert_options(path, options, type)


def convert_options(path: Path, options: Mapping[str, object], type: type[T]) -> T:
    """Convert options to the struct `type`; drop options without a field. Raises CheckpointError."""
    try:
        return msgspec.convert(options, type)
    except (ValueError, re.error, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: {one_line(error, 400)}; check that the file is of this model"
        ) from error


def some(problems: Sequence[str], shown: int = 80) -> str:
    """Join the first problems in one line, each cut to `shown` characters; count the others."""
    more = f" (and {len(problems) - MOST_SHOWN} more)" if len(problems) > MOST_SHOWN else ""
    return "; ".join(one_line(each, shown) for each in problems[:MOST_SHOWN]) + more


def reason_of(error: Exception) -> str:
    said: Any = getattr(error, "strerror", None) or str(error) or error.__class__.__name__
    return one_line(said, 160).rstrip(".")


def one_line(value: object, shown: int = 80) -> str:
    """Return a value from a file as one line, safe to print and cut after `shown` characters."""
    return texts.one_line(value, shown)

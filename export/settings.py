"""Options that a trainer saved beside the weights, checked so that no model is exported wrongly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from stem_edge.errors import CheckpointError

SHOWN = 80


def check_options(
    path: Path,
    options: Mapping[str, object],
    *,
    expected: Mapping[str, tuple[object, ...]],
    ignored: Collection[str],
    advice: str,
) -> None:
    """Refuse an option, by its name, that changes the model in a way that is not supported.

    expected: option -> its supported values; ignored: options that change nothing of the model.
    Any other must be off (False, 0, empty): new options of a trainer are off by default.
    """
    for name, found in options.items():
        if name in ignored:
            continue
        if name in expected:
            wanted = " or ".join(map(repr, expected[name]))
            fits = any(isinstance(found, type(v)) and found == v for v in expected[name])
        else:
            wanted = "False" if isinstance(found, bool) else "off"
            fits = isinstance(found, bool | int | float | str | list | tuple | dict | None)
            fits = fits and not found
        if not fits:
            raise CheckpointError(
                f"{path}: {one_line(name)} is {one_line(repr(found))}; expected {wanted}: {advice}"
            )


def one_line(value: object, shown: int = SHOWN) -> str:
    """What a file says, fit for a message of one line and for a terminal."""
    text = str(value)
    cut = " ".join(text[: 8 * shown].split())
    cut = "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
    return cut if len(cut) <= shown and len(text) <= 8 * shown else cut[:shown] + "..."

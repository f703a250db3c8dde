"""Figures for people, drawn by matplotlib into files."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stem_edge.errors import InputError, StemEdgeError
from stem_edge.files.disk import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
# Inches, as wide as two columns of a paper; letters in points, as large as a caption's.
WIDTH, LETTERS = 7.0, 8


def check_plot(path: Path) -> None:
    """Raise InputError if a plot cannot be written there, StemEdgeError without matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: a plot can only be written as one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise StemEdgeError(
            "a plot needs matplotlib; install it with: pip install 'stem-edge[plot]'"
        ) from error


def draw(path: Path, plot: Callable[[Path], None]) -> None:
    """Plot into a file, and report on stderr that it was written or replaced."""
    done = "replaced" if path.exists() else "wrote"
    plot(path)
    print(f"{done} {path}", file=sys.stderr)


def new_figure(height: float) -> Figure:
    """Return an empty figure of this size in inches; matplotlib must be installed."""
    from matplotlib.figure import Figure  # rather than pyplot, which may open windows

    settings: dict[str, Any] = {"figsize": (WIDTH, height), "layout": "constrained"}
    return Figure(**settings)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix, atomically. Raises InputError."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200, format=path.suffix[1:].lower())
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise InputError(f"{path}: cannot write the plot ({error.strerror})") from error


def plain(axes: Axes) -> None:
    """Set small letters, and remove the frame except for the two axes."""
    axes.tick_params(labelsize=LETTERS)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(LETTERS)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

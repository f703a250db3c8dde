"""Plot of a measurement: memory of the bundle over time, and speed of each subject."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stem_edge.apps.measuring.runs.report import LABELS
from stem_edge.apps.measuring.runs.results import Report
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.files.disk import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".pdf", ".svg")
# Inches, as wide as two columns of a paper; letters in points, as large as a caption's.
SIZE, LETTERS = (7.0, 4.6), 8
# Colours of Okabe and Ito, which can also be told apart in grey, and by the colour-blind.
COLOURS = {
    "anonymous": "#D55E00",
    "shared": "#CC79A7",
    "libraries": "#999999",
    "other_files": "#CCCCCC",
    "tables": "#009E73",
    "backbone": "#56B4E9",
}
MB = 1e6
# Least shares of the whole time that a phase needs to show its name, upright and level.
NARROWEST, WIDE_ENOUGH = 0.02, 0.09


def check_plot(path: Path) -> None:
    """Raise InputError if no plot can be written to path, StemEdgeError without matplotlib."""
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


def plot(found: Report, path: Path) -> None:
    """Draw a measurement, write the plot to a file, and report it on stderr. Raises InputError."""
    from matplotlib.figure import Figure  # rather than pyplot, which may open windows

    figure = Figure(figsize=SIZE, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    for draw_panel, place in ((_memory, grid[0, 0]), (_speed, grid[1, 0])):
        axes = figure.add_subplot(place)
        draw_panel(axes, found)
        axes.tick_params(labelsize=LETTERS)
        axes.spines[["top", "right"]].set_visible(False)
    drawn, done = io.BytesIO(), "replaced" if path.exists() else "wrote"
    figure.savefig(drawn, dpi=200, format=path.suffix[1:].lower())
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise InputError(f"{path}: cannot write the plot ({error.strerror})") from error
    print(f"{done} {path}", file=sys.stderr)


def _memory(axes: Axes, found: Report) -> None:
    seconds = [sample.seconds for sample in found.samples]
    kinds = [kind for kind in COLOURS if any(getattr(s.memory, kind) for s in found.samples)]
    values = [[(getattr(s.memory, kind) or 0) / MB for s in found.samples] for kind in kinds]
    axes.stackplot(
        seconds,
        *values,
        labels=[LABELS[kind] for kind in kinds],
        colors=[COLOURS[kind] for kind in kinds],
        linewidth=0.3,
        edgecolor="white",
    )
    peak = next(iter(found.subjects.values())).figures()["peak_anonymous"] / MB
    axes.axhline(peak, color=COLOURS["anonymous"], linewidth=0.8, linestyle="--")
    top = 1.35 * max(map(sum, zip(*values, strict=True)))
    axes.set(ylim=(0, top))
    axes.set_xlabel("time, seconds", fontsize=LETTERS)
    axes.set_ylabel("resident memory, MB", fontsize=LETTERS)
    axes.set_xlim(0, max(seconds))
    _mark_phases(axes, found, top)
    name = f"{Path(found.bundle).resolve().name}; dashed: peak of anonymous memory and swap"
    axes.set_title(f"{name}, {peak:,.0f} MB", loc="left", fontsize=LETTERS)
    axes.legend(
        fontsize=LETTERS, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True
    )


def _mark_phases(axes: Axes, found: Report, top: float) -> None:
    """Draw a line at the end of each phase, and the names of phases that are long enough."""
    whole = max(sample.seconds for sample in found.samples)
    for phase in next(iter(found.subjects.values())).rounds[-1].phases:
        end = max(sample.seconds for sample in found.samples if sample.phase == phase.name)
        axes.axvline(end, color="black", linewidth=0.4)
        share, middle = phase.seconds / whole, (max(0.0, end - phase.seconds) + end) / 2
        if share > NARROWEST:
            turned = 0 if share > WIDE_ENOUGH else 90
            place: dict[str, Any] = {"ha": "center", "va": "top", "rotation": turned}
            axes.text(middle, 0.97 * top, phase.name, fontsize=LETTERS, **place)


def _speed(axes: Axes, found: Report) -> None:
    """Draw a bar for each subject, with the minimum and maximum of its rounds."""
    rates = {
        name: [each.figures["median_step"] for each in result.rounds]
        for name, result in reversed(found.subjects.items())
        if result.rounds
    }
    medians = [found.subjects[name].figures()["median_step"] for name in rates]
    spread = [
        [one - min(values) for one, values in zip(medians, rates.values(), strict=True)],
        [max(values) - one for one, values in zip(medians, rates.values(), strict=True)],
    ]
    names = [Path(name).name for name in rates]
    axes.barh(names, medians, xerr=spread, color=COLOURS["backbone"], ecolor="black")
    axes.set_xlabel("tokens decoded a second, by the median step", fontsize=LETTERS)

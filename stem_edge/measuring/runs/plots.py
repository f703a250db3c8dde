"""Plot of a measurement: memory of the bundle over time, and speed of each subject."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stem_edge.drawing import LETTERS, check_plot, new_figure, plain, save
from stem_edge.measuring.runs.report import LABELS
from stem_edge.measuring.runs.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 4.6  # inches
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


def plot(found: Report, path: str | Path) -> None:
    """Draw a measurement into a .png, .pdf or .svg file. Raises as check_plot does."""
    path = Path(path)
    check_plot(path)
    figure = new_figure(HEIGHT)
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    for draw_panel, place in ((_memory, grid[0, 0]), (_speed, grid[1, 0])):
        axes = figure.add_subplot(place)
        draw_panel(axes, found)
        plain(axes)
    save(figure, path)


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
    axes.set(xlabel="time, seconds", ylabel="resident memory, MB", ylim=(0, top))
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
    """Draw a bar for each subject, with the least and the most of the rounds."""
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
    axes.set(xlabel="tokens decoded a second, by the median step")

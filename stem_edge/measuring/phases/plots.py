"""Plot of a measurement: memory over time, hit rate by cache size, bytes of a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stem_edge.drawing import LETTERS, check_plot, new_figure, plain, save
from stem_edge.measuring.phases.measurement import Measurement
from stem_edge.measuring.phases.report import LABELS
from stem_edge.units import format_size

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


def plot(found: Measurement, path: str | Path) -> None:
    """Draw a measurement into a .png, .pdf or .svg file. Raises as check_plot does."""
    path = Path(path)
    check_plot(path)
    figure = new_figure(HEIGHT)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    for draw_panel, place in ((_memory, grid[0, :]), (_hit_rate, grid[1, 0]), (_token, grid[1, 1])):
        axes = figure.add_subplot(place)
        draw_panel(axes, found)
        plain(axes)
    save(figure, path)


def _memory(axes: Axes, found: Measurement) -> None:
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
    axes.axhline(found.peak / MB, color=COLOURS["anonymous"], linewidth=0.8, linestyle="--")
    top = 1.35 * max(map(sum, zip(*values, strict=True)))
    axes.set(xlabel="time, seconds", ylabel="resident memory, MB", ylim=(0, top))
    axes.set_xlim(0, max(seconds))
    _mark_phases(axes, found, top)
    name = Path(found.bundle).resolve().name + (f" on {found.device.name}" if found.device else "")
    peak = f"dashed: peak of anonymous memory and swap, {found.peak / MB:,.0f} MB"
    axes.set_title(f"{name}; {peak}", loc="left", fontsize=LETTERS)
    axes.legend(
        fontsize=LETTERS, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True
    )


def _mark_phases(axes: Axes, found: Measurement, top: float) -> None:
    """Draw a line at the end of each phase, and the names of phases that are long enough."""
    whole = max(sample.seconds for sample in found.samples)
    for phase in found.phases:
        times = [sample.seconds for sample in found.samples if sample.phase == phase.name]
        end = max(times)
        begin = end - phase.seconds
        axes.axvline(end, color="black", linewidth=0.4)
        share, middle = phase.seconds / whole, (max(0.0, begin) + end) / 2
        if share > NARROWEST:
            turned = 0 if share > WIDE_ENOUGH else 90
            place: dict[str, Any] = {"ha": "center", "va": "top", "rotation": turned}
            axes.text(middle, 0.97 * top, phase.name, fontsize=LETTERS, **place)


def _hit_rate(axes: Axes, found: Measurement) -> None:
    if not found.hit_curve:
        axes.text(0.5, 0.5, "a dense model has no rows", ha="center", fontsize=LETTERS)
        axes.set_axis_off()
        return
    slots = sorted(found.hit_curve)
    rates = [100 * found.hit_curve[count] for count in slots]
    axes.semilogx(slots, rates, color=COLOURS["tables"], marker="o", markersize=3, linewidth=1)
    mine = found.counters.get("slots", 0)
    if slots[0] <= mine <= 3 * slots[-1]:
        axes.axvline(mine, color="black", linewidth=0.6, linestyle=":")
        axes.set_title(f"dotted: the {mine:,.0f} slots of this run", loc="left", fontsize=LETTERS)
    axes.set(xlabel="slots of the row cache", ylabel="hit rate while decoding, %")
    axes.set_ylim(0, 102)


def _token(axes: Axes, found: Measurement) -> None:
    expected = found.prediction
    parts = {
        "rows, from flash": found.speed.flash_bytes_per_token or 0,
        "KV cache": expected.kv_per_token,
        "weights": expected.weights_per_token,
    }
    names, values = list(parts), [max(nbytes, 1.0) for nbytes in parts.values()]
    axes.barh(names, values, color=[COLOURS["tables"], COLOURS["anonymous"], COLOURS["backbone"]])
    axes.set_xscale("log")
    axes.set_xlim(1, 100 * max(values))
    for at, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.text(1.5 * value, at, format_size(parts[name]), va="center", fontsize=LETTERS)
    axes.set(xlabel="bytes that a decoded token reads (logarithmic)")

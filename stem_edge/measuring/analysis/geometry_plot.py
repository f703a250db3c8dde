"""Plot of the geometry of rows, like the STEM paper's figure 6: densities of cosines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from stem_edge.measuring.analysis.geometry import Geometry
from stem_edge.measuring.analysis.geometry_rows import GAUSSIAN_95, Spread
from stem_edge.measuring.bench.plots import LETTERS, check_plot, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from stem_edge.measuring.analysis.geometry_text import TextGeometry

HEIGHT, PANEL_WIDTH = 2.7, 2.4  # inches
MOST_LINES = 5  # of layers spread over all, because more lines cannot be told apart
# Light to dark shades of Okabe and Ito's green and vermilion.
STEM_SHADES = ("#8FD9C1", "#4DBE9B", "#009E73", "#00734F", "#00432E")
DENSE_SHADES = ("#F4B183", "#E98A4A", "#D55E00", "#A34700", "#6B2F00")
# So many bins are joined if there are fewer pairs, because the line would be ragged otherwise.
MANY_PAIRS, COARSER = 100_000, 4
Curve = tuple[str, Spread | None, str]  # name, cosines, colour


def plot_geometry(found: Geometry, path: str | Path) -> None:
    """Draw a geometry into a .png, .pdf or .svg file. Raises as check_plot does."""
    path = Path(path)
    check_plot(path)
    rows = [(f"layer {each.layer}", each.cosines) for each in found.layers]
    panels = [("(a) rows", _curves(rows, STEM_SHADES), found.random_p95_abs)]
    if (text := found.text) is not None:
        panels += [
            ("(b) up projection, or row", _both(text, "up"), text.random_p95_abs),
            ("(c) gated vector", _both(text, "gated"), text.random_p95_abs),
        ]
    figure = new_figure(HEIGHT, max(1.5, len(panels)) * PANEL_WIDTH)
    for number, (title, curves, random_p95) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        _panel(axes, curves, random_p95)
        axes.set_title(title, loc="left", fontsize=LETTERS)
        axes.set_xlabel("cosine of two vectors")
        axes.set_ylabel("density of pairs" if number == 1 else "")
        plain(axes)
    save(figure, path)


def _both(text: TextGeometry, what: Literal["up", "gated"]) -> list[Curve]:
    """Return the curves of STEM layers, then of dense ones."""
    named: dict[str, list[tuple[str, Spread | None]]] = {"STEM": [], "dense": []}
    for each in text.layers:
        kind = "dense" if each.kind == "dense" else "STEM"
        named[kind].append((f"{kind} {each.layer}", getattr(each, what)))
    return _curves(named["STEM"], STEM_SHADES) + _curves(named["dense"], DENSE_SHADES)


def _curves(layers: Sequence[tuple[str, Spread | None]], shades: Sequence[str]) -> list[Curve]:
    """Return the curves of a few layers, spread over all of them, light to dark."""
    count = min(len(layers), MOST_LINES)
    picked = np.linspace(0, len(layers) - 1, count).round().astype(int).tolist()
    colours = np.linspace(0, len(shades) - 1, count).round().astype(int).tolist()
    if count == 1:
        colours = [len(shades) // 2]
    return [(*layers[n], shades[at]) for n, at in zip(picked, colours, strict=True)]


def _panel(axes: Axes, curves: list[Curve], random_p95: float) -> None:
    """Draw densities of cosines; dashed: that of random directions."""
    for name, cosines, colour in curves:
        if cosines is None:
            continue
        step = 1 if cosines.pairs >= MANY_PAIRS else COARSER
        counts = np.array(cosines.histogram).reshape(-1, step).sum(axis=1)
        edges = np.linspace(*cosines.histogram_range, len(counts) + 1)
        density = counts / cosines.pairs / np.diff(edges)
        axes.plot((edges[:-1] + edges[1:]) / 2, density, color=colour, linewidth=1, label=name)
    deviation = random_p95 / GAUSSIAN_95
    at = np.linspace(-4, 4, 161)
    bell = np.exp(-at * at / 2) / np.sqrt(2 * np.pi) / deviation
    axes.plot(
        at * deviation, bell, color="black", linewidth=0.7, linestyle=(0, (4, 3)), label="random"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=LETTERS - 1, frameon=False, handlelength=1.2)

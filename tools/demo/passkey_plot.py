"""Plot of answers to passkeys: a panel for each K/V type, lengths by depths, darker where more are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.measuring.bench.plots import LETTERS, WIDTH, check_plot, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from passkey import Cell

# Inches: a depth's height, and that of titles and axis together; width of a panel if there are few.
ROW, AROUND, PANEL = 0.17, 0.8, 2.4
COLOURS = "cividis_r"  # can be told apart in grey, and by the colour-blind


def plot_cells(found: Sequence[Cell], path: str | Path) -> None:
    """Draw the cells into a .png, .pdf or .svg file. Raises as check_plot does."""
    path = Path(path)
    check_plot(path)
    panels = list(dict.fromkeys((cell.engine, cell.kv) for cell in found))
    depths = sorted({cell.depth for cell in found})
    width = min(WIDTH, 1 + PANEL * len(panels))
    figure = new_figure(AROUND + ROW * len(depths), width)
    every = [figure.add_subplot(1, len(panels), at + 1) for at in range(len(panels))]
    for axes, (engine, kv) in zip(every, panels, strict=True):
        image = _panel(axes, [c for c in found if (c.engine, c.kv) == (engine, kv)])
        axes.set_title(f"{engine}, K/V {kv}", loc="left", fontsize=LETTERS)
        if axes is not every[0]:
            axes.set(yticks=[], ylabel="")
        plain(axes)
    bar = figure.colorbar(image, ax=every, ticks=[0, 0.5, 1], label="right answers")
    bar.ax.set_yticklabels(["0", "50 %", "100 %"])
    plain(bar.ax)
    save(figure, path)


def _panel(axes: Axes, found: Sequence[Cell]) -> QuadMesh:
    """Draw the cells of one type, the least depth on top."""
    lengths = sorted({cell.length for cell in found})
    depths = sorted({cell.depth for cell in found})
    shares = {(cell.depth, cell.length): cell.right / cell.asked for cell in found}
    values = [[shares[depth, length] for length in lengths] for depth in depths]
    image = axes.pcolormesh(values, cmap=COLOURS, vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xticks([at + 0.5 for at in range(len(lengths))], map(short, lengths), rotation=90)
    axes.set_yticks([at + 0.5 for at in range(len(depths))], [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens", ylabel="depth of the key")
    return image


def short(tokens: int) -> str:
    """Format a number of tokens as 512 or 16k."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)

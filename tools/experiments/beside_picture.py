"""Draw README's picture, stem-edge beside llama.cpp in little memory, from the table in docs/models.md.

    python tools/experiments/beside_picture.py docs/models.md docs/beside.svg

Of each limit it takes stem-edge and llama.cpp's fastest mode. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HEADER = "| limit | | first token | decode, tokens a second (median step) | anonymous / mapped |"
OURS = "stem-edge"
COLORS = {OURS: "#1f6f8b", "llama.cpp Q4_0": "#c98b3a"}


class Run(NamedTuple):
    """One line of the table."""

    limit: str
    who: str
    speed: float  # tokens a second
    anonymous: int  # MiB
    mapped: int  # MiB


def runs(page: str) -> list[Run]:
    """Return for each limit stem-edge's run and llama.cpp's fastest, those that ended."""
    found, limit = dict[tuple[str, str], Run](), ""
    _, _, below = page.partition(HEADER + "\n")
    for line in below.splitlines()[1:]:
        if not line.startswith("|"):
            break
        first, mode, _, speed, memory, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        limit = first or limit
        if not speed:
            continue
        who = next(name for name in COLORS if mode.startswith(name))
        anonymous, mapped = (int(number) for number in re.findall(r"\d+", memory.replace(",", "")))
        run = Run(limit, who, float(speed.split()[0]), anonymous, mapped)
        found[limit, who] = max(run, found.get((limit, who), run), key=lambda one: one.speed)
    pairs = [run for run in found.values() if len([k for k in found if k[0] == run.limit]) > 1]
    if not pairs:
        raise SystemExit(f"no table below: {HEADER}")
    return pairs


def draw(chosen: Sequence[Run], path: Path) -> None:
    """Draw speed on the left, and memory on the right."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, for readers and for tests
    matplotlib.rcParams["svg.hashsalt"] = "stem-edge"  # the same file each time
    from matplotlib import pyplot

    figure, (speeds, memory) = pyplot.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    places = [n + n // 2 for n in range(len(chosen))]
    colors = [COLORS[run.who] for run in chosen]
    bars = speeds.barh(places, [run.speed for run in chosen], color=colors)
    speeds.bar_label(bars, [f"{run.speed:g}" for run in chosen], padding=3)
    speeds.set_title("tokens a second, decoding", fontsize=10)
    parts = memory.barh(places, [run.anonymous for run in chosen], color=colors)
    memory.bar_label(parts, [f"{run.anonymous:,}" for run in chosen], padding=3, color="black")
    mapped = memory.barh(
        places,
        [run.mapped for run in chosen],
        left=[run.anonymous for run in chosen],
        color=colors,
        alpha=0.35,
    )
    memory.bar_label(mapped, [f"+ {run.mapped:,}" for run in chosen], padding=3)
    memory.set_title("MiB, anonymous + mapped files", fontsize=10)
    names = [f"{run.who}, {run.limit}" for run in chosen]
    for axes in (speeds, memory):
        _tidy(axes, places)
    speeds.set_yticks(places, names)
    figure.savefig(path, metadata={"Date": None})


def _tidy(axes: Any, places: Sequence[int]) -> None:
    axes.set_yticks(places, [""] * len(places))
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, help="docs/models.md")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    args = parser.parse_args()
    draw(runs(args.page.read_text(encoding="utf-8")), args.picture)


if __name__ == "__main__":
    main()

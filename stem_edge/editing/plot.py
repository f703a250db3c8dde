"""Plot of a comparison, after figure 7 of the STEM paper: bars of the next token, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.drawing import LETTERS, WIDTH, check_plot, new_figure, plain, save
from stem_edge.editing.compare import Comparison, NextToken, Outcome
from stem_edge.editing.report import head, shown, tail

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches: height of a bar, and of title and axis together.
BAR, AROUND = 0.26, 1.1
# Palette of Okabe and Ito, so that colour-blind readers can tell them apart.
COLOURS = {"original": "#999999", "target prompt": "#56B4E9", "edited": "#D55E00"}
MOST_BARS = 40  # of a panel
CHARACTERS = 24  # of the prompt and of its continuation


def plot_comparison(found: Comparison, path: str | Path) -> None:
    """Draw a comparison into a .png, .pdf or .svg file. Raises as check_plot does."""
    path = Path(path)
    check_plot(path)
    panels = found.outcomes()
    bars = min(len(found.original.top), MOST_BARS)
    figure = new_figure(AROUND + BAR * bars, WIDTH * len(panels) / len(COLOURS))
    for number, (name, outcome) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), number)
        _panel(axes, name, outcome)
        plain(axes)
    save(figure, path)


def _panel(axes: Axes, name: str, outcome: Outcome) -> None:
    """Draw bars of the most probable tokens, the first on top."""
    tokens = outcome.top[:MOST_BARS]
    places = range(len(tokens))
    axes.barh(places, [token.probability for token in tokens], color=COLOURS[name])
    axes.set_yticks(places, [_label(token) for token in tokens])
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_xlim(0, 1.3)  # above 1, because the number needs room to the right of a bar
    axes.set_ylim(len(tokens) - 0.5, -0.5)
    axes.spines["bottom"].set_bounds(0, 1)
    for place, token in enumerate(tokens):
        words = f" {token.probability:.1%}"
        axes.text(token.probability, place, words, va="center", fontsize=LETTERS)
    prompt, text = tail(outcome.prompt, CHARACTERS), head(outcome.text, CHARACTERS)
    words = _drawable(f"{name}\n{prompt}\n{text}")
    title = axes.set_title(words, loc="left", fontsize=LETTERS)
    for label in (title, *axes.get_yticklabels()):
        label.set_parse_math(False)  # otherwise a $ in a text begins a formula


def _label(token: NextToken) -> str:
    words = shown(token)
    return words if _drawable(words) == words else f"token {token.token_id}"


def _drawable(text: str) -> str:
    """Replace each character that the font lacks by a box."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in known or c == "\n" else "\N{WHITE SQUARE}" for c in text)

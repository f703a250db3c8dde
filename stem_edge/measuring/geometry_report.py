"""`stem-edge inspect --geometry`: its options, and its figures for people and as JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

from stem_edge.errors import InputError
from stem_edge.measuring.geometry import (
    LARGEST_SAMPLE,
    NEIGHBOURS,
    SAMPLE,
    Geometry,
    LayerGeometry,
    Nearest,
    Neighbour,
    geometry,
)
from stem_edge.measuring.geometry_spread import THRESHOLDS, Spread

WIDTH = 80  # columns
LONGEST_TOKEN = 24  # characters
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no whole character
OPTIONS = ("sample", "seed", "layers", "token", "plot")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what belongs to --geometry alone."""
    group = parser.add_argument_group("of --geometry")
    group.add_argument(
        "--layers", metavar="2,5", help="STEM layers to look at, with commas between (all)"
    )
    group.add_argument(
        "--token",
        action="append",
        metavar="TEXT",
        help=f'show the {NEIGHBOURS} tokens whose rows are nearest to this one\'s, like " France"; '
        "may be given again",
    )
    group.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help=f"rows of a layer, whose cosines are all taken ({SAMPLE}; at most {LARGEST_SAMPLE})",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the sample (0)")
    group.add_argument(
        "--plot", metavar="FILE", help="also draw it, as the paper's figure 6: .png, .pdf or .svg"
    )


def check_options(args: argparse.Namespace) -> None:
    """Raises InputError for options of --geometry without it."""
    given = [f"--{name}" for name in OPTIONS if getattr(args, name) is not None]
    if given and not args.geometry:
        raise InputError(
            f"{' and '.join(given)}: only for --geometry, which is not given; add --geometry"
        )


def show_geometry(args: argparse.Namespace) -> None:
    """Measure and print, and draw if that is asked for. Raises as `geometry` does."""
    if args.plot is not None:  # its errors first: reading the tables takes long
        from stem_edge.measuring.plots import check_plot

        check_plot(Path(args.plot))
    found = geometry(
        args.bundle,
        layers=_numbers(args.layers) if args.layers is not None else None,
        sample=SAMPLE if args.sample is None else args.sample,
        seed=args.seed or 0,
        text=args.text,
        tokens=args.token or (),
    )
    if args.plot is not None:
        from stem_edge.measuring.geometry_plot import plot_geometry

        plot_geometry(found, args.plot)
    print(json.dumps(geometry_figures(found), indent=1) if args.json else geometry_table(found))


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"--layers {text!r} are no layers; write numbers with commas, like 2,5")
    return [int(part) for part in parts]


def geometry_figures(found: Geometry) -> dict[str, object]:
    """All of it as plain JSON values."""
    return asdict(found)


def geometry_table(found: Geometry) -> str:
    """A readable table, as wide as a small terminal."""
    lines = [found.bundle, ""]
    lines += _paragraph(
        f"Cosines between rows of {found.width} values ({found.row_type}), all pairs of up to "
        f"{found.sample:,} rows of a layer (seed {found.seed}); lengths of all {found.tokens:,} "
        f"rows. Near 0 is nearly orthogonal: random directions have a P95 |cos| of "
        f"{found.random_p95_abs:.3f}."
    )
    lines += ["", *_rows(found.layers)]
    if found.nearest:
        lines += ["", *_paragraph(_about_nearest(found))]
    for nearest in found.nearest:
        lines += ["", *_nearest(nearest)]
    if found.text is not None:
        lines += ["", *_text(found)]
    return "\n".join(lines)


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _rows(layers: tuple[LayerGeometry, ...]) -> Iterator[str]:
    yield f"{'':>8}{'cosine of two rows':<44}length of a row"
    above = "".join(f"{f'>{at:g}':>8}" for at in THRESHOLDS)
    yield (
        f"{'layer':>5}{'mean':>8}{'P95 |cos|':>11}{above}"
        f"{'least':>9}{'median':>8}{'most':>8}{'zero':>7}"
    )
    for layer in layers:
        norms = layer.norms
        lengths = (norms.least, norms.median, norms.greatest) if norms else (0.0, 0.0, 0.0)
        least, middle, most = (f"{length:.3g}" for length in lengths)
        shares = "".join(f"{share:>8}" for share in _shares(layer.cosines))
        yield (
            f"{layer.layer:>5}{_mean(layer.cosines):>8}{_p95(layer.cosines):>11}{shares}"
            f"{least:>9}{middle:>8}{most:>8}{layer.zero_rows:>7,}"
        )


def _short(token: Nearest | Neighbour) -> str:
    """A token's text in quotes, cut where it is long; its id, where it is no text of its own."""
    text = token.text
    if not text or REPLACEMENT in text:
        return f"token {token.token_id}"
    return repr(text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 3] + "...")


def _mean(cosines: Spread | None) -> str:
    # Adding 0.0 takes the sign from what was rounded to -0.0.
    return f"{round(cosines.mean, 3) + 0.0:.3f}" if cosines else "-"


def _p95(cosines: Spread | None) -> str:
    return f"{cosines.p95_abs:.3f}" if cosines else "-"


def _shares(cosines: Spread | None) -> list[str]:
    if cosines is None:
        return ["-"] * len(THRESHOLDS)
    return [f"{cosines.share_above[at]:.1%}" for at in THRESHOLDS]


def _about_nearest(found: Geometry) -> str:
    return (
        f"Nearest rows by cosine, of all {found.tokens:,}; the nearest of as many random "
        f"directions would be at {found.random_nearest:.2f}, so what is not above that is chance."
    )


def _nearest(nearest: Nearest) -> list[str]:
    lines = [f"to {_short(nearest)}, token {nearest.token_id}"]
    for layer, found in nearest.layers.items():
        words = [
            f"{_short(each)} {each.cosine:.2f}".replace(" ", "\N{NO-BREAK SPACE}") for each in found
        ]
        text = ",  ".join(words) or "none, the row is zero"
        wrapped = textwrap.wrap(text, WIDTH - 7, break_on_hyphens=False)
        for number, line in enumerate(wrapped):
            shown = line.replace("\N{NO-BREAK SPACE}", " ")
            lines.append(f"{layer if number == 0 else '':>5}  {shown}")
    return lines


def _text(found: Geometry) -> list[str]:
    text = found.text
    if text is None:
        return []
    lines = _paragraph(
        f"{text.file}: the first {text.positions:,} tokens, in contexts of up to {text.window}. "
        f"Cosines between {text.chosen:,} positions, each of another token, of what the up "
        "projection makes (in STEM layers the row instead) and of the gated vector, the input "
        f"of the down projection. Random directions: P95 |cos| {text.random_p95_abs:.3f}."
    )
    above = f">{THRESHOLDS[-1]:g}"
    lines += ["", f"{'':>18}{'up projection or row':^27}{'gated vector':^27}".rstrip()]
    lines += [f"{'layer':>5}  {'':<11}" + f"{'mean':>8}{'P95 |cos|':>11}{above:>8}" * 2]
    for layer in text.layers:
        parts = [f"{layer.layer:>5}  {layer.kind:<11}"]
        for cosines in (layer.up, layer.gated):
            parts.append(f"{_mean(cosines):>8}{_p95(cosines):>11}{_shares(cosines)[-1]:>8}")
        lines.append("".join(parts))
    return [*lines, *_summary(found)]


def _summary(found: Geometry) -> list[str]:
    """Dense against STEM layers in one line, where the text's layers are of both kinds."""
    layers = found.text.layers if found.text else ()
    values: dict[bool, list[float]] = {True: [], False: []}
    for layer in layers:
        if layer.up is not None:
            values[layer.kind == "dense"].append(layer.up.p95_abs)
    if not all(values.values()):
        return []
    dense, stem = median(values[True]), median(values[False])
    return [
        "",
        f"P95 |cos|, median layer: up projections {dense:.3f}, rows {stem:.3f}.",
    ]

"""Report of `stem-edge inspect --geometry`, and the options that belong to it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from stem_edge.errors import InputError
from stem_edge.measuring.analysis.geometry import (
    LARGEST_SAMPLE,
    SAMPLE,
    Geometry,
    LayerGeometry,
    geometry,
)
from stem_edge.measuring.analysis.geometry_rows import THRESHOLDS, CosineSpread
from stem_edge.number_lists import parse_numbers
from stem_edge.text_table import table, wrapped

ROW_TITLES = (
    *("layer", "cos: mean", "P95 |cos|", *(f">{at:g}" for at in THRESHOLDS)),
    *("length: least", "median", "most", "zero"),
)
OPTIONS = ("sample", "seed", "layers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only --geometry takes."""
    add = parser.add_argument_group("with --geometry").add_argument
    add("--layers", metavar="2,5", help="STEM layers to look at, with commas between (all)")
    add("--token", help=argparse.SUPPRESS)  # of the release before
    sample = f"rows of a layer whose cosines are taken ({SAMPLE}; at most {LARGEST_SAMPLE})"
    add("--sample", type=int, metavar="N", help=sample)
    add("--seed", type=int, metavar="N", help="of the sample (0)")
    add("--plot", help=argparse.SUPPRESS)  # of the release before


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError for options of --geometry without it, and for those that are gone."""
    if args.plot is not None:
        raise InputError("--plot is gone; --json has the histograms to draw")
    if args.token is not None:
        raise InputError("--token is gone; read rows with stem_edge.open_tables to compare them")
    if args.geometry and args.text is not None:
        raise InputError(
            f"--geometry --text {args.text}: activations are no longer compared, only rows; leave "
            "out --text"
        )
    given = [f"--{name}" for name in OPTIONS if getattr(args, name) is not None]
    if given and not args.geometry:
        raise InputError(f"{' and '.join(given)}: only for --geometry; add --geometry")


def show_geometry(args: argparse.Namespace) -> None:
    """Measure and print. Raises as `geometry` does."""
    found = geometry(
        args.bundle,
        layers=parse_numbers("--layers", args.layers),
        sample=SAMPLE if args.sample is None else args.sample,
        seed=args.seed or 0,
    )
    print(json.dumps(asdict(found), indent=1) if args.json else geometry_table(found))


def geometry_table(found: Geometry) -> str:
    """Return the report for people, as wide as a small terminal."""
    lines = [found.bundle, ""]
    lines += wrapped(
        f"Cosines between rows of {found.width} values ({found.row_type}), all pairs of up to "
        f"{found.sample:,} rows of a layer (seed {found.seed}); lengths of all {found.tokens:,} "
        "rows. A cosine near 0 means nearly orthogonal: random directions have a P95 |cos| of "
        f"{found.random_p95_abs:.3f}."
    )
    lines += ["", *table([ROW_TITLES, *map(_row, found.layers)], "r")]
    return "\n".join(lines)


def _row(layer: LayerGeometry) -> tuple[str, ...]:
    norms = layer.norms
    lengths = (norms.least, norms.median, norms.greatest) if norms else (0.0, 0.0, 0.0)
    rounded = (f"{length:.3g}" for length in lengths)
    return (str(layer.layer), *_spread(layer.cosines), *rounded, f"{layer.zero_rows:,}")


def _spread(cosines: CosineSpread | None) -> tuple[str, ...]:
    """Return mean, P95 and shares above the thresholds."""
    if cosines is None:
        return ("-",) * (2 + len(THRESHOLDS))
    shares = (f"{cosines.share_above[at]:.1%}" for at in THRESHOLDS)
    # 0.0 is added, because a small negative mean would otherwise show as -0.000.
    return (f"{round(cosines.mean, 3) + 0.0:.3f}", f"{cosines.p95_abs:.3f}", *shares)

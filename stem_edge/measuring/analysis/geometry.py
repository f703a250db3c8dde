"""Where the rows of a table point: the figures of `stem-edge inspect --geometry`.

The STEM paper (section 5.1, figure 6) reads them so: rows that are nearly orthogonal to each other
disturb each other little, so that many facts find room. Dense layers have no rows; what stands in
their place is what the up projection makes of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.bundle.manifest import TABLES, TOKENIZER, Bundle, open_bundle
from stem_edge.bundle.tables import open_tables
from stem_edge.errors import InputError
from stem_edge.measuring.analysis.geometry_rows import (
    Best,
    Spread,
    random_nearest,
    random_p95,
    read_rows,
    spread,
    stream,
)
from stem_edge.measuring.run.workload import one_token
from stem_edge.numerics.quantize import F32, I64

if TYPE_CHECKING:
    from stem_edge.measuring.analysis.geometry_text import TextGeometry
    from stem_edge.runtime.text.codec import TextCodec

SAMPLE, NEIGHBOURS = 2048, 8
# All cosines of so many rows are 34 million numbers.
LARGEST_SAMPLE = 8192
MOST_THREADS = 1024


@dataclass(frozen=True)
class Norms:
    """Lengths of all rows of a layer that are not zero."""

    least: float
    median: float
    greatest: float


@dataclass(frozen=True)
class LayerGeometry:
    """The rows of one STEM layer."""

    layer: int
    zero_rows: int  # of the whole table; left out of everything else
    norms: Norms | None  # of the whole table; None if all rows are zero
    cosines: Spread | None  # of the sample; None if fewer than two rows are not zero


@dataclass(frozen=True)
class Neighbour:
    """A token whose row is near."""

    token_id: int
    text: str
    cosine: float


@dataclass(frozen=True)
class Nearest:
    """The rows nearest to a token's, layer by layer, the nearest first; none to a row of zeros."""

    token_id: int
    text: str
    layers: dict[int, tuple[Neighbour, ...]]


@dataclass(frozen=True)
class Geometry:
    """All figures of one bundle."""

    bundle: str
    tokens: int  # rows of each table
    width: int  # values of a row, as it is stored
    row_type: str
    sample: int  # rows, at most, whose cosines were taken
    seed: int  # what chose them
    random_p95_abs: float  # P95 |cos| of random directions of this width
    random_nearest: float  # cosine of the nearest of as many random directions
    layers: tuple[LayerGeometry, ...]
    nearest: tuple[Nearest, ...]
    text: TextGeometry | None


def geometry(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
    text: str | Path | None = None,
    tokens: Sequence[str | int] = (),
    neighbours: int = NEIGHBOURS,
    threads: int | None = None,
    progress: bool | None = None,
) -> Geometry:
    """How the rows of a bundle spread over directions. The tables are read once from end to end.

    layers: STEM layers (all); sample: rows of a layer whose cosines are taken, pair by pair;
    tokens: texts of one token each, or ids, whose `neighbours` nearest rows are looked for;
    text: also compare what the FFNs of dense and of STEM layers have inside, on this file (UTF-8):
        it is run on onnxruntime, with `threads` (all processors); see geometry_text.
    progress: a bar on stderr (on a terminal).

    Raises InputError for a model without rows of tokens, a layer without a table, a text that is
    no single token, numbers out of range, a text too short; BundleError, BackendError.
    """
    from stem_edge.runtime.text.codec import TextCodec

    bundle = open_bundle(path)
    chosen = _layers(bundle, layers)
    _check_range("sample", sample, LARGEST_SAMPLE)
    _check_range("neighbours", neighbours, bundle.manifest.model.vocab_size, least=1)
    if seed < 0:
        raise InputError(f"seed is {seed}; expected 0 or more")
    if threads is not None:
        _check_range("threads", threads, MOST_THREADS, least=1)
    tokens = [tokens] if isinstance(tokens, str) else tokens
    codec = TextCodec(bundle.file(TOKENIZER)) if tokens else None
    queries = [one_token(bundle, codec, each) for each in tokens] if codec else []
    of_text = None
    if text is not None:  # first, because reading all rows takes long
        from stem_edge.measuring.analysis.geometry_text import text_geometry

        of_text = text_geometry(bundle, Path(text), chosen, sample, seed, threads, progress)
    root, count = bundle.file(TABLES), bundle.manifest.model.vocab_size
    norms, best = stream(root, count, chosen, queries, neighbours, progress)
    with open_tables(root) as tables:
        width, row_type = tables.layout.row_width, tables.layout.row_type
    order = np.random.default_rng(seed).permutation(count)
    return Geometry(
        bundle=str(bundle.path),
        tokens=count,
        width=width,
        row_type=row_type if bundle.manifest.rare_tables is None else "mixed",
        sample=sample,
        seed=seed,
        random_p95_abs=random_p95(width),
        random_nearest=random_nearest(width, count),
        layers=tuple(_of_layer(root, n, norms[n], order, sample) for n in chosen),
        nearest=tuple(_nearest(codec, best, n, q) for n, q in enumerate(queries)) if codec else (),
        text=of_text,
    )


def _of_layer(root: Path, layer: int, norms: F32, order: I64, sample: int) -> LayerGeometry:
    """`order`: the tokens shuffled; the first of them whose rows are not zero are the sample."""
    present = norms[norms > 0]
    ids = np.sort(order[norms[order] > 0][:sample])
    cosines = spread(read_rows(root, ids, layer)) if len(ids) else None
    lengths = None
    if len(present):
        least, median, greatest = present.min(), np.median(present), present.max()
        lengths = Norms(float(least), float(median), float(greatest))
    return LayerGeometry(layer, len(norms) - len(present), lengths, cosines)


def _nearest(codec: TextCodec, best: dict[int, Best], number: int, token: int) -> Nearest:
    def text(of: int) -> str:
        return codec.decode([of], skip_special_tokens=False)

    def neighbours(of: Best) -> tuple[Neighbour, ...]:
        pairs = zip(of.token_ids[number].tolist(), of.cosines[number].tolist(), strict=True)
        return tuple(Neighbour(id_, text(id_), cosine) for id_, cosine in pairs if id_ >= 0)

    return Nearest(token, text(token), {n: neighbours(of) for n, of in best.items()})


def _layers(bundle: Bundle, wanted: Sequence[int] | None) -> list[int]:
    model = bundle.manifest.model
    if not model.stem_layers:
        raise InputError(
            f"{bundle.path}: a dense model has no tables, so there are no rows to look at; give "
            "the bundle of a STEM model"
        )
    if model.stem_ffn == "hash-moe":
        raise InputError(
            f"{bundle.path}: the rows of this model are {model.n_experts} experts, matrices that "
            "tokens share and not directions; give the bundle of a model with a row for each token"
        )
    if wanted is None:
        return list(model.stem_layers)
    if not wanted:
        raise InputError("no layers are given; name some STEM layers, or leave the choice out")
    if unknown := sorted(set(wanted) - set(model.stem_layers)):
        known = ", ".join(map(str, model.stem_layers))
        raise InputError(
            f"layer {unknown[0]} has no table in {bundle.path}; choose of its STEM layers: {known}"
        )
    return sorted(set(wanted))


def _check_range(name: str, value: int, largest: int, least: int = 2) -> None:
    if not least <= value <= largest:
        raise InputError(f"{name} is {value}; expected {least} to {largest}")

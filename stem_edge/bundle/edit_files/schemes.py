"""Alignment schemes of edits: which rows of a target text each token of a source text looks up.

The schemes come from the STEM paper, section 3.3; docs/edit.md lists them. The source has n_s tokens, the target n_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from stem_edge.errors import InputError
from stem_edge.tables.rows import Row

Scheme = Literal["auto", "swap", "pad-left", "pad-right", "copy", "subset", "average"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
# Scheme -> signs of n_s - n_t that it can align.
FITS: dict[Scheme, tuple[int, ...]] = {
    "swap": (0,),
    "pad-left": (0, 1),
    "pad-right": (0, 1),
    "copy": (0, 1),
    "subset": (-1, 0),
    "average": (-1, 0, 1),
}
# Chosen by measurement (tools/demo/edit_table.py), because the paper names no best scheme.
AUTO: dict[int, Scheme] = {0: "swap", 1: "copy", -1: "subset"}


def fits(scheme: Scheme, source_length: int, target_length: int) -> bool:
    """Return True if a scheme can align a source and a target of these lengths in tokens."""
    return scheme == "auto" or _sign(source_length, target_length) in FITS.get(scheme, ())


def _sign(source_length: int, target_length: int) -> int:
    return (source_length > target_length) - (source_length < target_length)


def choose_scheme(scheme: Scheme, source_length: int, target_length: int) -> Scheme:
    """Return the scheme to align texts of these lengths ("auto": choose one). Raises InputError."""
    sign = _sign(source_length, target_length)
    if scheme == "auto":
        return AUTO[sign]
    if scheme not in FITS:
        raise InputError(f"scheme is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    if not fits(scheme, source_length, target_length):
        fitting = [name for name in FITS if sign in FITS[name]]
        raise InputError(
            f"scheme {scheme} does not fit a source of {source_length} and a target of "
            f"{target_length} tokens; use one of {', '.join(fitting)}, or auto"
        )
    return scheme


def align(
    scheme: Scheme, source_length: int, target: Sequence[int], *, pad: int | None = None
) -> list[Row]:
    """Return, for each token of the source, the ids of the tokens whose table rows it looks up.

    target: token ids. pad: id of the padding token. Raises InputError if lengths or options do not fit.
    """
    count = len(target)
    if not source_length or not count:
        raise InputError("source and target need at least one token each")
    chosen = choose_scheme(scheme, source_length, count)
    if chosen == "average":
        return [tuple(target)] * source_length
    if chosen == "subset":
        return [(token,) for token in target[count - source_length :]]
    spare = source_length - count
    if chosen in ("pad-left", "pad-right") and spare:
        if pad is None:
            raise InputError(f"scheme {chosen} needs a padding token; name one")
        padded = [pad] * spare + list(target), list(target) + [pad] * spare
        return [(token,) for token in padded[chosen == "pad-right"]]
    if chosen == "copy":
        repeated = [token for token in target for _ in range(source_length // count)]
        repeated += [target[-1]] * (source_length - len(repeated))
        return [(token,) for token in repeated]
    return [(token,) for token in target]

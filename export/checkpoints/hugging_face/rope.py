"""Reads the RoPE parameters of a config.json, which has two forms.

    "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}

Transformers 5 writes the second form. Early files have "type" instead of "rope_type".
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from stem_edge.layers import RopeScaling

THETA = 10000.0  # default of transformers
TYPES = ("default", "linear", "llama3", "yarn", "proportional")
CONTEXT = "original_max_position_embeddings"


def read_rope(
    theta: float | None, older: dict[str, Any] | None, newer: dict[str, Any] | None, context: int
) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling of RoPE from keys of a config.json. Raises ValueError if unsupported.

    older: rope_scaling; newer: rope_parameters; context: max_position_embeddings.
    """
    if older and newer:
        raise ValueError("both rope_scaling and rope_parameters are given; expected one of them")
    given = {name: value for name, value in (older or newer or {}).items() if value is not None}
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    if kind not in TYPES:
        raise ValueError(f"rope_type is {kind!r}; expected one of {', '.join(TYPES)}")
    if given.get("partial_rotary_factor") == 1 and kind != "proportional":
        del given["partial_rotary_factor"]
    try:
        own = msgspec.convert(given.pop("rope_theta", theta), float | None)
        return THETA if own is None else own, _scaling(kind, given, context)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"RoPE of type {kind}: {error}") from error


def _scaling(kind: str, given: dict[str, Any], context: int) -> RopeScaling | None:
    """Return the RopeScaling of rope_type `kind`; None for "default".

    given: the other options; context: max_position_embeddings. A missing option gets transformers'
    default. Raises ValidationError or TypeError for unknown or wrong options.
    """
    fields = dict(given)
    if kind in ("llama3", "yarn"):
        fields["original_context"] = fields.pop(CONTEXT, None) or context
    if kind == "yarn":
        fields.setdefault("factor", context / fields["original_context"])
        scales = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)
        one, other = scales if all(scales) else (1, 0)
        growth = 0.1 * math.log(max(1, fields["factor"]))
        fields.setdefault("attention_factor", (one * growth + 1) / (other * growth + 1))
        fields = {name: value for name, value in fields.items() if value or "beta" not in name}
    elif kind == "proportional":
        fields["share"] = fields.pop("partial_rotary_factor", 1.0)
    elif kind == "default":
        if fields:
            raise TypeError(f"unknown field `{next(iter(fields))}`")
        return None
    scaling: RopeScaling = msgspec.convert(fields | {"type": kind}, RopeScaling)
    return scaling

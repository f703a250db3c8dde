"""Reading RoPE from config.json, which has two forms.

    "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}

The second is the form of transformers 5. Early files have "type" instead of "rope_type".
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from stem_edge.layers import LinearRope, Llama3Rope, ProportionalRope, RopeScaling, YarnRope

THETA = 10000.0  # default of transformers


class _Rope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="rope_type"):
    rope_theta: float | None = None

    def scaling(self, context: int) -> RopeScaling | None:
        """Return the scaling as ModelConfig has it; context: max_position_embeddings."""
        return None


class _Default(_Rope, tag="default"):
    pass


class _Linear(_Rope, tag="linear"):
    factor: float

    def scaling(self, context: int) -> RopeScaling | None:
        return LinearRope(self.factor)


class _Llama3(_Rope, tag="llama3"):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int | None = None

    def scaling(self, context: int) -> RopeScaling | None:
        original = self.original_max_position_embeddings or context
        return Llama3Rope(self.factor, self.low_freq_factor, self.high_freq_factor, original)


class _Yarn(_Rope, tag="yarn"):
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True

    def scaling(self, context: int) -> RopeScaling | None:
        original = self.original_max_position_embeddings or context
        factor = context / original if self.factor is None else self.factor
        size = self.attention_factor
        if size is None and self.mscale and self.mscale_all_dim:
            size = _growth(factor, self.mscale) / _growth(factor, self.mscale_all_dim)
        return YarnRope(
            factor,
            original,
            attention_factor=_growth(factor, 1) if size is None else size,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            truncate=self.truncate,
        )


class _Proportional(_Rope, tag="proportional"):
    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def scaling(self, context: int) -> RopeScaling | None:
        return ProportionalRope(self.partial_rotary_factor, self.factor)


_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def read_rope(
    theta: float | None, older: dict[str, Any] | None, newer: dict[str, Any] | None, context: int
) -> tuple[float, RopeScaling | None]:
    """Return rope_theta and the scaling, from rope_theta, rope_scaling, rope_parameters and
    max_position_embeddings of a config.json. Raises ValueError.
    """
    if older and newer:
        raise ValueError("both rope_scaling and rope_parameters are given; expected one of them")
    given = {name: value for name, value in (older or newer or {}).items() if value is not None}
    kind = given.pop("type", "default")
    given.setdefault("rope_type", kind)
    if given["rope_type"] not in _TYPES:
        raise ValueError(
            f"rope_type is {given['rope_type']!r}; expected one of {', '.join(_TYPES)}"
        )
    if given.get("partial_rotary_factor") == 1 and given["rope_type"] != "proportional":
        del given["partial_rotary_factor"]
    try:
        rope = msgspec.convert(given, type=_Default | _Linear | _Llama3 | _Yarn | _Proportional)
    except msgspec.ValidationError as error:
        raise ValueError(f"RoPE of type {given['rope_type']}: {error}") from error
    if rope.rope_theta is not None:
        theta = rope.rope_theta
    return THETA if theta is None else theta, rope.scaling(context)


def _growth(factor: float, scale: float) -> float:
    """Return YaRN's factor of cosines and sines."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

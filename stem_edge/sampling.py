"""Sampling parameters that a model's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# Smallest and largest values. Divisions by temperatures and penalties outside these limits would leave float32.
# If the limits are integers, the values must be integers, too.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}
NEUTRAL: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
FILTERS = ("top_k", "top_p", "min_p")


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model's recommended values for fields of SamplingParams; None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.values().items():
            least, most = RANGES[name]
            if not least <= value <= most or (name == "top_p" and value == 0):
                raise ValueError(f"{name} is {value}; expected {least} to {most}")

    def values(self) -> dict[str, float]:
        """Return the parameters that are set, by name."""
        pairs = {name: getattr(self, name) for name in RANGES}
        return {name: value for name, value in pairs.items() if value is not None}


# Defaults for conversations, if neither caller nor model sets values.
CONVERSATION: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}

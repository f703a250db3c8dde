"""Sampling parameters that a model's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# Temperature and penalty have ends because float32 cannot divide by what is beyond. Integer ends mean
# whole numbers only.
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
    """Values for choosing tokens, as SamplingParams has them; None where nothing is said."""

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


# For conversations, where neither caller nor model says anything.
CONVERSATION = Sampling(temperature=0.7, top_p=0.95)


def resolved(
    given: Mapping[str, float], own: Sampling | None = None, otherwise: Sampling | None = None
) -> dict[str, float]:
    """Return all values for choosing tokens: those given, else the model's own, else neutral ones.

    otherwise: for a model that names no temperature. A given temperature of 0 is greedy, so that what
    is not given is neutral then. Filters without a temperature sample at 1.
    """
    said = dict[str, float]()
    if given.get("temperature") != 0:
        said = {} if own is None else own.values()
        if "temperature" not in said and otherwise is not None:
            said = otherwise.values() | said
    said |= given
    filtered = any(said.get(name, NEUTRAL[name]) != NEUTRAL[name] for name in FILTERS)
    return {"temperature": 1.0 if filtered else 0.0} | NEUTRAL | said

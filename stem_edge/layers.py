"""Parts of a model description: kinds of FFN, RoPE and its scalings, and sizes of single layers."""

from __future__ import annotations

from typing import Literal

import msgspec

Term = Literal["matrix", "row", "mix"]
# An FFN computes W_down (SiLU(gate) * up); gate and up are each W x, the token's row, or their sum.
# With a mix, the sum is (1 - s) W x + s row, s the logistic function of the layer's parameter `mix`.
# An expert is a dense FFN with its three matrices in the row.
FFN_TERMS: dict[str, dict[str, tuple[Term, ...]]] = {
    "dense": {"gate": ("matrix",), "up": ("matrix",)},
    "stem": {"gate": ("matrix",), "up": ("row",)},  # STEM paper, eq. 4
    "stem-plus": {"gate": ("matrix",), "up": ("matrix", "row")},  # eq. 5
    "stem-mix": {"gate": ("matrix",), "up": ("matrix", "row", "mix")},
    "stem-gate": {"gate": ("row",), "up": ("matrix",)},  # section 4.4.2
    "hash-moe": {},  # eq. 3, one expert per token
    # Per-layer embeddings (Gemma): a dense FFN, after which a product with the row is added.
    "ple": {"gate": ("matrix",), "up": ("matrix",)},
    # n-grams: rows are added to the input of the first layer, or through a gate in some layers (Engram).
    "ngrams": {"gate": ("matrix",), "up": ("matrix",)},
    "engram": {"gate": ("matrix",), "up": ("matrix",)},
}
Activation = Literal["silu", "gelu"]  # of the gate; gelu in its tanh form
LENT = ("wk", "wv", "k_norm")  # tensors that layers with borrowed K and V lack
BIASED = ("wq", "wk", "wv", "wo", "gate", "up", "down", "head")


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """Linear scaling: positions are divided by `factor`."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, with a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class YarnRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """YaRN (arXiv 2309.00071): a ramp over dimensions, and a factor on cosines and sines."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp begins and ends at whole dimensions


class ProportionalRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proportional"):
    """Gemma 4: divides the highest frequencies by `factor`, and sets all lower ones to 0."""

    share: float  # of frequencies that are not set to 0
    factor: float = 1.0


RopeScaling = LinearRope | Llama3Rope | YarnRope | ProportionalRope


class Rope(msgspec.Struct, frozen=True):
    width: int  # head_dim
    theta: float
    scaling: RopeScaling | None


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and RoPE of some layers, where they differ from the model's; 0: as in the model."""

    layers: tuple[int, ...]  # ascending
    head_dim: int = 0
    n_kv_heads: int = 0
    d_ff: int = 0
    sparsity: float = 0.0  # share of gates to set to 0, if they were normally distributed
    rope_theta: float = 0.0
    rope_scaling: RopeScaling | None = None  # read only if rope_theta is given


class Layer(msgspec.Struct, frozen=True):
    """Sizes, RoPE and attention window of one layer.

    kv_layer: layer that computes its K and V. sparsity: share of FFN gates that are set to 0.
    """

    head_dim: int
    n_kv_heads: int
    d_ff: int
    rope: Rope
    window: int  # tokens that attention sees, the current one included; 0: all
    kv_layer: int  # itself, or an earlier layer
    sparsity: float = 0.0

    @property
    def cutoff(self) -> float:
        """Sets small gates to 0: those below the mean + cutoff * standard deviation of a token's gates."""
        from statistics import NormalDist  # 3 ms, only for such models

        return NormalDist().inv_cdf(self.sparsity)

"""How backbones are stored: the types that a manifest names."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from stem_edge.numerics.quantize import MIN_BLOCK

MAX_BLOCK = 256
EngineName = Literal["onnxruntime", "ggml"]
WeightType = Literal["fp32", "int8", "int4"]
WEIGHT_BITS: dict[WeightType, int] = {"fp32": 32, "int8": 8, "int4": 4}
# qkv are the three matrices before attention, stacked; project makes rows of low-rank tables.
# ple_: of per-layer embeddings.
MatrixKind = Literal[
    "embedding", "head", "qkv", "wo", "gate", "up", "down", "project",
    "ple_context", "ple_gate", "ple_out",
]  # fmt: skip
MATRIX_KINDS: tuple[MatrixKind, ...] = get_args(MatrixKind)
# Few parameters that much depends on: 4 bits there cost more than anywhere else.
PLE_KINDS: tuple[MatrixKind, ...] = ("ple_context", "ple_gate", "ple_out")
VOCABULARY_KINDS: tuple[MatrixKind, ...] = ("embedding", "head")
QuantizerName = Literal["rtn", "search", "gptq"]
# As llama.cpp names its mixtures of tensor types (stem_edge.ggml.gguf_schema).
GgufType = Literal["f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)


class BackboneFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the backbone for onnxruntime is stored."""

    weights: WeightType  # matrices of the layers
    head: WeightType  # embedding and head, the two matrices of V rows
    # Inputs that share a scale, at most; a narrow matrix uses less.
    block_size: Annotated[int, msgspec.Meta(ge=MIN_BLOCK, le=MAX_BLOCK)]
    kinds: dict[MatrixKind, WeightType] = {}  # those of another type than that
    asymmetric: bool = False  # whether each block has a zero point of its own
    quantizer: QuantizerName = "rtn"  # how the codes were chosen
    prefill: bool = False  # whether there are int8 matrices for prompts
    # Of these, products without a norm before them whose input channels are balanced all the same.
    balanced: tuple[str, ...] = ()

    def type_of(self, kind: MatrixKind) -> WeightType:
        """Type of the matrices of a kind."""
        return self.kinds.get(kind, usual_type(kind, self.weights, self.head))

    def bits(self, kind: MatrixKind) -> int:
        """Bits of a value in the matrices of a kind."""
        return WEIGHT_BITS[self.type_of(kind)]

    @property
    def quantized(self) -> bool:
        """Whether any matrix is."""
        return any(self.bits(kind) < 32 for kind in MATRIX_KINDS)


def usual_type(kind: MatrixKind, weights: WeightType, head: WeightType) -> WeightType:
    """Type of the matrices of a kind where nobody asks for another."""
    if kind in VOCABULARY_KINDS:
        return head
    return "int8" if kind in PLE_KINDS and weights == "int4" else weights


class GgufFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the backbone for ggml is stored."""

    weights: GgufType
    importance: bool = False  # whether channels were weighted by a calibration text

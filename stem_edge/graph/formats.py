"""Storage formats of backbones: the types of matrices that a manifest names."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import MIN_BLOCK

MAX_BLOCK = 256
BACKBONE_DATA = "backbone.onnx.data"
BACKBONE_GRAPH = "backbone.onnx"
PREFILL_DATA = "prefill.data"
ASSISTANT_DATA = "assistant.data"
GGUF = "backbone.gguf"
EngineName = Literal["onnxruntime", "ggml"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
# int2 only for matrices that a checkpoint has as such: nothing here rounds to 2 bits.
WeightType = Literal["fp32", "int8", "int4", "int2"]
WEIGHT_BITS: dict[WeightType, int] = {"fp32": 32, "int8": 8, "int4": 4, "int2": 2}
# qkv stacks the three matrices before attention, but v is apart where its type differs; project expands the rows of low-rank tables; those
# with ple belong to per-layer embeddings, laurel is beside attention, and altup at both ends of the
# layers. AltUp's coefficients within layers have no kind, because they are floats in every format. Those
# of an assistant lead from and to the model that it drafts for, and to its clusters.
MatrixKind = Literal[
    "embedding", "head", "qkv", "v", "wo", "gate", "up", "down", "project",
    "ple_context", "ple_gate", "ple_out", "laurel_in", "laurel_out", "altup_in", "altup_out",
    "assistant",
]  # fmt: skip
MATRIX_KINDS: tuple[MatrixKind, ...] = get_args(MatrixKind)
PLE_KINDS: tuple[MatrixKind, ...] = ("ple_context", "ple_gate", "ple_out")
# These have 8 bits where the weights have 4: they are small, and 4 bits cost more here than
# anywhere else.
SMALL_KINDS: tuple[MatrixKind, ...] = (
    *PLE_KINDS, "laurel_in", "laurel_out", "altup_in", "altup_out", "assistant",
)  # fmt: skip
VOCABULARY_KINDS: tuple[MatrixKind, ...] = ("embedding", "head")
QuantizerName = Literal["rtn", "search", "gptq"]
# llama.cpp's names for its mixtures of tensor types (stem_edge.ggml.gguf_schema).
GgufType = Literal["f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
# Part of a layer ("wv") or one tensor ("layers.3.wv", which goes before) -> ggml's name of its type.
OwnTypes = dict[str, str]


class BackboneFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Storage format of a backbone for onnxruntime."""

    engine: ClassVar[EngineName] = "onnxruntime"
    field: ClassVar[str] = "backbone"  # of the manifest
    files: ClassVar[tuple[str, ...]] = (BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA)
    packed: ClassVar[bool] = True  # whether a processor wants weights in another order
    importance: ClassVar[bool] = False
    weights: WeightType  # matrices of the layers
    head: WeightType  # embedding and head, the two matrices of V rows
    # Most inputs that share a scale; blocks are smaller where the width of a matrix needs it.
    block_size: Annotated[int, msgspec.Meta(ge=MIN_BLOCK, le=MAX_BLOCK)]
    kinds: dict[MatrixKind, WeightType] = {}  # kinds that depart from weights or head
    # Products of layers, such as layers.3.down, that depart from their kind.
    matrices: dict[str, WeightType] = {}
    tied: bool = False  # whether the matrix that is both embedding and head is stored once
    asymmetric: bool = False  # whether blocks have their own zero points
    # Whether products of 4 bits add a float to each symmetric block, as Q4_1 and Q4_K of a GGUF file do.
    offsets: bool = False
    quantizer: QuantizerName = "rtn"  # how the codes were chosen
    prefill: bool = False  # whether prompts have separate int8 matrices
    # Products for prompts with balanced input channels but no norm before them, so that the balance
    # needs an extra multiplication.
    balanced: tuple[str, ...] = ()
    kv_peaks: bool = False  # whether there are peaks of keys and values (stem_edge.graph.kv)

    @property
    def name(self) -> str:
        """Name to show to users: the quantization type of most matrices."""
        return self.weights

    def type_of(self, kind: MatrixKind, name: str = "") -> WeightType:
        """Return the type of a kind of matrices, or of the product `name` if it has a type of its own."""
        usual = usual_type(kind, self.weights, self.head)
        if kind == "v":
            usual = self.kinds.get("qkv", usual)
        return self.matrices.get(name, self.kinds.get(kind, usual))

    def bits(self, kind: MatrixKind, name: str = "") -> int:
        """Return the bits per value of a kind of matrices, or of the product `name`; see type_of."""
        return WEIGHT_BITS[self.type_of(kind, name)]

    def values_apart(self, layer: int) -> bool:
        """Return True if v has a product of its own in a layer, because its weight type is not that of q and k."""
        at = f"layers.{layer}."
        return self.type_of("v", at + "v") != self.type_of("qkv", at + "qkv")

    def judged(self) -> BackboneFormat:
        """Return the format after calibration with a text, which provides peaks of keys and values."""
        return msgspec.structs.replace(self, kv_peaks=True)

    @property
    def for_prompts(self) -> bool:
        """True if separate int8 matrices for prompts are worth their bytes."""
        return self.weights != "fp32"

    def stored_once(self, shared: bool) -> BackboneFormat:
        """Return the format, with one stored matrix for embedding and head if both have the same type.

        shared: True if embedding and head are one matrix in the model.
        """
        same = self.type_of("embedding") == self.type_of("head")
        return msgspec.structs.replace(self, tied=shared and same)

    @property
    def quantized(self) -> bool:
        """True if any matrix is quantized."""
        return self._types != {"fp32"}

    def has(self, type: WeightType) -> bool:
        """Return True if any matrix has this type."""
        return type in self._types

    @property
    def _types(self) -> set[WeightType]:
        return {self.type_of(kind) for kind in MATRIX_KINDS} | set(self.matrices.values())


def usual_type(kind: MatrixKind, weights: WeightType, head: WeightType) -> WeightType:
    """Return the default type for a kind of matrices."""
    if kind in VOCABULARY_KINDS:
        return head
    return "int8" if kind in SMALL_KINDS and weights == "int4" else weights


class GgufFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Storage format of a backbone for ggml."""

    engine: ClassVar[EngineName] = "ggml"
    field: ClassVar[str] = "gguf"
    files: ClassVar[tuple[str, ...]] = (GGUF,)
    packed: ClassVar[bool] = False
    prefill: ClassVar[bool] = False
    for_prompts: ClassVar[bool] = False
    kv_peaks: ClassVar[bool] = False
    weights: GgufType | OwnTypes  # a mixture; or the types that a GGUF file came with
    importance: bool = False  # whether a calibration text weighted the channels

    @property
    def name(self) -> str:
        """Name to show to users: the mixture of quantization types."""
        return self.weights if isinstance(self.weights, str) else "types of the GGUF file"

    def judged(self) -> GgufFormat:
        """Return the format unchanged: calibration with a text adds nothing to it."""
        return self

    def stored_once(self, shared: bool) -> GgufFormat:
        """Return the format unchanged: a model without a head matrix always uses its embedding."""
        return self


class Assistant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model's own drafter and how it is stored; stem_edge.graph.special.assistant says what it computes.

    Its own layers come last. Each layer before them stands for the model's last layer of the same kind.
    """

    model: ModelConfig
    format: BackboneFormat
    clusters: int = 0  # of tokens, all of one size; 0: the head scores every token
    best: int = 0  # clusters whose tokens are scored

"""Storage formats of backbones: the type of each matrix, as a bundle's manifest records it."""

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
# int2 only for matrices that already have 2 bits in the checkpoint: the exporter never rounds to 2 bits.
WeightType = Literal["fp32", "int8", "int4", "int2"]
WEIGHT_BITS: dict[WeightType, int] = {"fp32": 32, "int8": 8, "int4": 4, "int2": 2}
# qkv: wq, wk and wv stacked; v: wv alone, where its type differs. project: expands rows of low-rank tables. ple_*:
# per-layer embeddings. laurel_*: parallel to attention. altup_*: before the first and after the last layer; AltUp's
# matrices within layers have no kind, because all formats store them as float32. assistant: projections from and
# to the target model, and the scores of clusters.
MatrixKind = Literal[
    "embedding", "head", "qkv", "v", "wo", "gate", "up", "down", "project",
    "ple_context", "ple_gate", "ple_out", "laurel_in", "laurel_out", "altup_in", "altup_out",
    "assistant",
]  # fmt: skip
MATRIX_KINDS: tuple[MatrixKind, ...] = get_args(MatrixKind)
PLE_KINDS: tuple[MatrixKind, ...] = ("ple_context", "ple_gate", "ple_out")
# Small matrices, which have 8 bits if `weights` is int4: 4 bits would cost more quality than in others.
SMALL_KINDS: tuple[MatrixKind, ...] = (
    *PLE_KINDS, "laurel_in", "laurel_out", "altup_in", "altup_out", "assistant",
)  # fmt: skip
VOCABULARY_KINDS: tuple[MatrixKind, ...] = ("embedding", "head")
# See BackboneFormat.split. Rows of so many values become float32 at once. Larger blocks of memory are new pages in each
# step (PROMPT_NBYTES in runtime/backends/onnxruntime/loaded.py), which took 5 of 50 ms in a 1B model.
BEST, BEST_VALUES = 512, 96 << 10
LOW_STEPS = 8  # of the lower bits in a step of the higher ones
QuantizerName = Literal["rtn", "search", "gptq"]
# llama.cpp's names for its mixtures of tensor types (stem_edge.ggml.gguf_schema).
GgufType = Literal["f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
# Part of a layer ("wv") or tensor ("layers.3.wv", which takes precedence) -> ggml's name of the type.
OwnTypes = dict[str, str]


class BackboneFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the matrices of a backbone for onnxruntime are stored.

    The type of a matrix is in `matrices` (by name), else in `kinds` (by kind), else it is `head` or `weights`.
    offsets: each symmetric 4-bit block also has a float offset, as in the GGUF types Q4_1 and Q4_K. balanced:
    names of the products for prompts that multiply their input by SmoothQuant factors, because no norm before
    them can. field: name in the manifest. packed: a load can repack the weights.
    """

    engine: ClassVar[EngineName] = "onnxruntime"
    field: ClassVar[str] = "backbone"
    files: ClassVar[tuple[str, ...]] = (BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA)
    packed: ClassVar[bool] = True
    weights: WeightType  # matrices of the layers
    head: WeightType  # embedding and head, the two matrices of V rows
    # Largest number of inputs that share a scale; smaller in matrices whose width it does not divide.
    block_size: Annotated[int, msgspec.Meta(ge=MIN_BLOCK, le=MAX_BLOCK)]
    kinds: dict[MatrixKind, WeightType] = {}
    matrices: dict[str, WeightType] = {}  # key: name of a product, such as layers.3.down
    tied: bool = False  # whether embedding and head share a stored matrix (see `split`)
    asymmetric: bool = False  # whether blocks have their own zero points
    offsets: bool = False
    quantizer: QuantizerName = "rtn"  # how the codes were chosen
    prefill: bool = False  # whether prompts have separate int8 matrices
    balanced: tuple[str, ...] = ()
    kv_peaks: bool = False  # whether the weight file has peaks of keys and values (weight_plan)

    @property
    def name(self) -> str:
        """Name to show to users: the quantization type of most matrices."""
        return self.weights

    def type_of(self, kind: MatrixKind, name: str = "") -> WeightType:
        """Return the weight type set for the product `name`, or else the type for its `kind`."""
        usual = usual_type(kind, self.weights, self.head)
        if kind == "v":
            usual = self.kinds.get("qkv", usual)
        return self.matrices.get(name, self.kinds.get(kind, usual))

    def bits(self, kind: MatrixKind, name: str = "") -> int:
        """Return the bits per weight of the product `name`, or of its `kind`."""
        return WEIGHT_BITS[self.type_of(kind, name)]

    @property
    def split(self) -> bool:
        """True if the embedding is stored as the head's 4 bits and, in a second matrix, 4 lower bits.

        The head adds the lower bits to each token's BEST greatest logits only (special/best_logits.py).
        """
        return self.tied and (self.bits("head"), self.bits("embedding")) == (4, 8)

    def types(self) -> set[WeightType]:
        return {self.type_of(kind) for kind in MATRIX_KINDS} | set(self.matrices.values())


def usual_type(kind: MatrixKind, weights: WeightType, head: WeightType) -> WeightType:
    """Return the default type: `head` or `weights`; for small matrices, int8 instead of int4."""
    if kind in VOCABULARY_KINDS:
        return head
    return "int8" if kind in SMALL_KINDS and weights == "int4" else weights


class GgufFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: ClassVar[EngineName] = "ggml"
    field: ClassVar[str] = "gguf"
    files: ClassVar[tuple[str, ...]] = (GGUF,)
    packed: ClassVar[bool] = False
    split: ClassVar[bool] = False
    prefill: ClassVar[bool] = False
    kv_peaks: ClassVar[bool] = False
    weights: GgufType | OwnTypes  # a mixture, or the types in the GGUF file that was imported
    importance: bool = False  # whether quantization weighted channels by a calibration text

    @property
    def name(self) -> str:
        return self.weights if isinstance(self.weights, str) else "types of the GGUF file"


class Assistant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Draft model that reads its target model's keys and values.

    The first layers of `model` are placeholders for the target's layers, whose keys and values the
    other layers read. Only these other layers are computed (graph/special/assistant.py).
    clusters: number of equal parts that the vocabulary is divided into, or 0. With clusters, the
    head scores only the tokens in the `best` most probable clusters.
    """

    model: ModelConfig
    format: BackboneFormat
    clusters: int = 0
    best: int = 0

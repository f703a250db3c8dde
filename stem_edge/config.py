"""The description of a model that exporter, reference model and runtime share.

It is the one place that says what a model computes; a new architecture is a checkpoint reader that
fills it in.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Literal, get_args

import msgspec

# Far above any published model, so that a damaged or hostile number is refused before it sizes an
# array.
MAX_VOCAB = 1 << 24
MAX_LAYERS = 1 << 8  # twice the deepest, because each costs time and memory before weights do
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_CONTEXT = 1 << 24
MAX_PARAMETERS = 1 << 40  # of the backbone, because its graph gets a node for every few million
LARGEST = {
    "vocab_size": MAX_VOCAB,
    "n_layers": MAX_LAYERS,
    "max_context": MAX_CONTEXT,
    **dict.fromkeys(("dim", "head_dim", "d_ff"), MAX_WIDTH),
    **dict.fromkeys(("n_heads", "n_kv_heads"), MAX_HEADS),
}
MAX_FACTOR = 1 << 16
MAX_KINDS = 8  # of layers, and of tokens that are no text; published models have up to 4
MAX_THETA = 1e15
LEAST_SCALING = 1e-6
MAX_SOFTCAP = 1e6

Term = Literal["matrix", "row"]
# An FFN computes W_down (SiLU(gate) * up); gate and up are each W x, the token's row, or their sum.
# An expert is a dense FFN whose three matrices are the row.
FFN_TERMS: dict[str, dict[str, tuple[Term, ...]]] = {
    "dense": {"gate": ("matrix",), "up": ("matrix",)},
    "stem": {"gate": ("matrix",), "up": ("row",)},  # STEM paper, eq. 4
    "stem-plus": {"gate": ("matrix",), "up": ("matrix", "row")},  # eq. 5
    "stem-gate": {"gate": ("row",), "up": ("matrix",)},  # section 4.4.2
    "hash-moe": {},  # eq. 3, one expert per token
    # Per-layer embeddings (Gemma): a dense FFN, after which a product with the row is added.
    "ple": {"gate": ("matrix",), "up": ("matrix",)},
}
Activation = Literal["silu", "gelu"]  # of the gate; gelu in its tanh form
LENT = ("wk", "wv", "k_norm")  # tensors that layers with borrowed K and V lack
BIASED = ("wq", "wk", "wv", "wo", "gate", "up", "down", "head")


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """Linear scaling: positions are divided by `factor`."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp between."""

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
    """Gemma 4: the highest frequencies, a `share`, are divided by `factor`; the rest become 0."""

    share: float
    factor: float = 1.0


RopeScaling = LinearRope | Llama3Rope | YarnRope | ProportionalRope


class Rope(msgspec.Struct, frozen=True):
    """Rotation in one kind of layer."""

    width: int  # head_dim
    theta: float
    scaling: RopeScaling | None


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and rotation in which some layers differ from the model; 0: as in the model."""

    layers: tuple[int, ...]  # ascending
    head_dim: int = 0
    n_kv_heads: int = 0
    d_ff: int = 0
    rope_theta: float = 0.0
    rope_scaling: RopeScaling | None = None  # read only if rope_theta is given


class Layer(msgspec.Struct, frozen=True):
    """Sizes, rotation and window of one layer, wherever the model describes them."""

    head_dim: int
    n_kv_heads: int
    d_ff: int
    rope: Rope
    window: int  # tokens that attention sees, the current one included; 0: all
    kv_layer: int  # the layer that computes its K and V: itself, or an earlier one


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A decoder-only transformer with RMS norms, RoPE and gated FFNs, some of them STEM layers.

    Raises ValueError when the numbers contradict each other.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    stem_layers: tuple[int, ...]  # ascending; the layers that take rows
    norm_eps: float
    rope_theta: float
    max_context: int  # tokens the model was built for
    stem_ffn: str = "stem"  # what the FFNs of STEM layers compute: a key of FFN_TERMS
    row_rank: int = 0  # low-rank tables: the row is P E[t], E on flash; 0: the row is U[t]
    n_experts: int = 0  # hash-moe: records, each shared by many tokens
    tied_head: bool = False
    rope_interleaved: bool = True  # pairs (0,1), (2,3)... as in the STEM trainer; False: halves
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # tokens that attention sees, the current one included; 0: all
    window_layers: tuple[int, ...] | None = None  # layers with that window; None: all
    qk_norm_eps: float | None = None  # of the RMS norm of q and k heads before RoPE; None: no norm
    post_norms: bool = False  # an RMS norm after attention and after the FFN, too
    biases: tuple[str, ...] = ()  # matrices with a bias, a subset of BIASED
    logit_softcap: float = 0.0  # logits become cap * tanh(logits / cap); 0: no cap
    layer_kinds: tuple[LayerKind, ...] = ()  # layers that differ from the rest
    # Number of layers at the end that borrow K and V, each from the last layer of its kind before.
    borrowed_kv_layers: int = 0
    embedding_scale: float = 1.0  # factor of hidden states that come from the embedding
    activation: Activation = "silu"
    attention_scale: float = 0.0  # factor of scores; 0: 1 / sqrt(head_dim)
    v_norm: bool = False  # an RMS norm of v heads, without a weight
    layer_scale: bool = False  # hidden states after a layer are multiplied by a factor of its own
    ple_width: int = 0  # per-layer embeddings: values of a row
    ple_scale: float = 1.0  # per-layer embeddings: factor of rows that come from the tables
    # Per-layer embeddings: ids with rows of their own, while the others use row 0; 0: all ids.
    ple_records: int = 0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    placeholders: dict[str, int] = {}  # "an image" or the like -> id of the token in its place

    def __post_init__(self) -> None:
        for field, largest in LARGEST.items():
            if not 0 < (value := getattr(self, field)) <= largest:
                raise ValueError(f"{field} is {value}; expected 1 to {largest}")
        self._check_layers("stem_layers", self.stem_layers)
        self._check_layers("window_layers", self.window_layers or ())
        # Each layer looks through all of these, and each rotation has tables for the whole context.
        for name, count in (
            ("layer_kinds", len(self.layer_kinds)),
            ("placeholders", len(self.placeholders)),
        ):
            if count > MAX_KINDS:
                raise ValueError(f"{count} {name}; expected at most {MAX_KINDS}")
        for kind in self.layer_kinds:
            self._check_layers("layers of layer_kinds", kind.layers)
            if kind.d_ff and self.stem_ffn != "ple" and set(kind.layers) & set(self.stem_layers):
                raise ValueError(f"d_ff {kind.d_ff} of layers {kind.layers}: rows have one width")
        if not 0 <= self.borrowed_kv_layers < self.n_layers:
            raise ValueError(
                f"borrowed_kv_layers is {self.borrowed_kv_layers} of {self.n_layers} layers"
            )
        for layer in self.layers:
            self._check_layer(layer)
        self._check_rows()
        self._check_extras()
        if (count := self.backbone_parameters) > MAX_PARAMETERS:
            raise ValueError(f"a backbone of {count} parameters; expected at most {MAX_PARAMETERS}")
        special = (*self.eos_ids, *self.placeholders.values())
        for token in (*special, *([] if self.bos_id is None else [self.bos_id])):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"special token id {token} is outside the vocab_size {self.vocab_size}"
                )

    def _check_layer(self, layer: Layer) -> None:
        if not (layer.head_dim > 0 and 0 < layer.d_ff <= MAX_WIDTH and layer.n_kv_heads > 0):
            raise ValueError(f"layer_kinds has a size out of range: {layer}")
        if self.n_heads % layer.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {layer.n_kv_heads}"
            )
        if self.n_heads * layer.head_dim > MAX_WIDTH:
            raise ValueError(
                f"n_heads {self.n_heads} times head_dim {layer.head_dim} is above {MAX_WIDTH}"
            )
        if layer.head_dim % 2:
            raise ValueError(f"head_dim {layer.head_dim} is odd; RoPE rotates pairs")
        if not (0 < self.norm_eps < 1 and 1 < layer.rope.theta <= MAX_THETA):
            raise ValueError(
                f"norm_eps {self.norm_eps} or rope_theta {layer.rope.theta} is out of range; "
                f"expected 0 to 1 and 1 to {MAX_THETA:g}"
            )
        if layer.rope.scaling is not None:
            _check_scaling(layer.rope.scaling)

    def _check_layers(self, field: str, layers: tuple[int, ...]) -> None:
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"{field} {layers} is not ascending without repeats")
        if layers and not 0 <= layers[0] <= layers[-1] < self.n_layers:
            raise ValueError(f"{field} {layers} is outside the {self.n_layers} layers")

    def _check_rows(self) -> None:
        known = [kind for kind in FFN_TERMS if kind != "dense"]
        if self.stem_ffn not in known:
            raise ValueError(f"stem_ffn is {self.stem_ffn!r}; expected one of {', '.join(known)}")
        hashed = self.stem_ffn == "hash-moe"
        if hashed != (self.n_experts > 0) or not 0 <= self.n_experts <= self.vocab_size:
            raise ValueError(
                f"n_experts is {self.n_experts} in a {self.stem_ffn} model; expected 1 to "
                f"{self.vocab_size} for hash-moe, 0 for others"
            )
        ple = self.stem_ffn == "ple"
        if not 0 <= self.row_rank <= self.d_ff or (self.row_rank and (hashed or ple)):
            raise ValueError(
                f"row_rank is {self.row_rank} in a {self.stem_ffn} model; expected 0 to "
                f"{self.d_ff}, and 0 for hash-moe and ple"
            )
        if ple != (0 < self.ple_width <= MAX_WIDTH) or not ple >= (self.ple_records > 0):
            raise ValueError(
                f"ple_width is {self.ple_width} and ple_records {self.ple_records} in a "
                f"{self.stem_ffn} model; expected a width of 1 to {MAX_WIDTH} for ple, 0 and 0 for "
                "others"
            )
        if ple and len(self.stem_layers) != self.n_layers:
            raise ValueError(
                f"stem_layers is {self.stem_layers} in a ple model; expected all {self.n_layers} layers"
            )
        if not 0 <= self.ple_records <= self.vocab_size:
            raise ValueError(f"ple_records is {self.ple_records} of {self.vocab_size} tokens")

    def _check_extras(self) -> None:
        unknown = [name for name in self.biases if name not in BIASED]
        if unknown or len(set(self.biases)) < len(self.biases):
            raise ValueError(
                f"biases {self.biases}; expected some of {', '.join(BIASED)}, once each"
            )
        if "head" in self.biases and self.tied_head:
            raise ValueError("a head that is tied to the embedding cannot have a bias")
        if not 0 <= self.sliding_window <= MAX_CONTEXT:
            raise ValueError(
                f"sliding_window is {self.sliding_window}; expected 0 to {MAX_CONTEXT}"
            )
        if self.logit_softcap and not LEAST_SCALING <= self.logit_softcap <= MAX_SOFTCAP:
            raise ValueError(
                f"logit_softcap is {self.logit_softcap}; expected 0, or {LEAST_SCALING:g} to "
                f"{MAX_SOFTCAP:g}"
            )
        if self.qk_norm_eps is not None and not 0 <= self.qk_norm_eps < 1:
            raise ValueError(f"qk_norm_eps is {self.qk_norm_eps}; expected 0 to 1")
        for field in ("embedding_scale", "ple_scale", "attention_scale"):
            value, least = getattr(self, field), 0 if field == "attention_scale" else LEAST_SCALING
            if not least <= value <= MAX_WIDTH:
                raise ValueError(f"{field} is {value}; expected {least} to {MAX_WIDTH}")
        if self.activation not in get_args(Activation):
            raise ValueError(f"activation is {self.activation!r}; expected silu or gelu")
        if self.v_norm and self.qk_norm_eps is None:
            raise ValueError("v_norm needs the epsilon of qk_norm_eps")

    def ffn_kind(self, layer: int) -> str:
        """Key of FFN_TERMS for the FFN of a layer."""
        return self.stem_ffn if layer in self.stem_layers else "dense"

    def window(self, layer: int) -> int:
        """Tokens that the attention of a layer sees; 0: all."""
        everywhere = self.window_layers is None or layer in self.window_layers
        return self.sliding_window if everywhere else 0

    def layer(self, number: int) -> Layer:
        """Description of a layer."""
        return self.layers[number]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Descriptions of all layers. Raises ValueError if no layer can lend one K and V."""
        found, lenders = list[Layer](), dict[tuple[Rope, int, int], int]()
        for number in range(self.n_layers):
            layer = self._own_layer(number)
            kind = layer.rope, layer.window, layer.n_kv_heads
            if number < self.own_kv_layers:
                lenders[kind] = number
            elif kind not in lenders:
                raise ValueError(
                    f"layer {number} has no K and V, and no layer before it has its kind"
                )
            found.append(msgspec.structs.replace(layer, kv_layer=lenders[kind]))
        return tuple(found)

    def _own_layer(self, number: int) -> Layer:
        """Description of a layer as if it had K and V of its own."""
        kinds = [kind for kind in self.layer_kinds if number in kind.layers]

        def own(field: str) -> int:
            values: list[int] = [getattr(one, field) for one in (*kinds, self)]
            return next(filter(None, values))

        theta, scaling = self.rope_theta, self.rope_scaling
        for kind in kinds:
            if kind.rope_theta:
                theta, scaling = kind.rope_theta, kind.rope_scaling
        rope = Rope(own("head_dim"), theta, scaling)
        heads, window = own("n_kv_heads"), self.window(number)
        return Layer(rope.width, heads, own("d_ff"), rope, window, number)

    @property
    def plain(self) -> bool:
        """Return whether all layers have the model's sizes, SiLU, and K and V of their own.

        All engines run such models; only onnxruntime's CPU graphs run the others.
        """
        scales = (self.embedding_scale, self.attention_scale)
        unusual = self.layer_kinds or self.borrowed_kv_layers or self.ple_width
        unusual = unusual or self.v_norm or self.layer_scale or self.activation != "silu"
        return not unusual and scales == (1.0, 0.0)

    @property
    def own_kv_layers(self) -> int:
        """Number of the first layers that compute K and V of their own."""
        return self.n_layers - self.borrowed_kv_layers

    @property
    def lenders(self) -> frozenset[int]:
        """Layers whose K and V later layers read."""
        borrowing = range(self.own_kv_layers, self.n_layers)
        return frozenset(self.layer(number).kv_layer for number in borrowing)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotations of all layers, each once, in the order of the layers that first use them."""
        return tuple(dict.fromkeys(self.layer(number).rope for number in range(self.n_layers)))

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a layer's tensors in the backbone, matrices as [outputs, inputs]."""
        own = self.layer(layer)
        q, kv = self.n_heads * own.head_dim, own.n_kv_heads * own.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attention_norm": (self.dim,),
            "wq": (q, self.dim),
            "wk": (kv, self.dim),
            "wv": (kv, self.dim),
            "wo": (self.dim, q),
        }
        if self.qk_norm_eps is not None:
            shapes |= {"q_norm": (own.head_dim,), "k_norm": (own.head_dim,)}
        if own.kv_layer != layer:
            shapes = {name: shape for name, shape in shapes.items() if name not in LENT}
        shapes["ffn_norm"] = (self.dim,)
        if self.post_norms:
            shapes |= {"attention_post_norm": (self.dim,), "ffn_post_norm": (self.dim,)}
        terms = FFN_TERMS[self.ffn_kind(layer)]
        shapes |= {n: (own.d_ff, self.dim) for n, parts in terms.items() if "matrix" in parts}
        if terms:
            shapes["down"] = (self.dim, own.d_ff)
        if self.row_rank and any("row" in parts for parts in terms.values()):
            shapes["project"] = (self.d_ff, self.row_rank)
        if self.ffn_kind(layer) == "ple":
            shapes |= {
                "ple_context": (self.ple_width, self.dim),
                "ple_gate": (self.ple_width, self.dim),
                "ple_out": (self.dim, self.ple_width),
                "ple_post_norm": (self.dim,),
            }
        if self.layer_scale:
            shapes["layer_scale"] = (1,)
        biased = [name for name in shapes if name in self.biases]
        return shapes | {f"{name}.bias": shapes[name][:1] for name in biased}

    def backbone_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every backbone tensor, matrices as [outputs, inputs]."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            shapes |= {f"layers.{layer}.{n}": s for n, s in self.layer_shapes(layer).items()}
        if self.ple_width:
            shapes["ple_norm"] = (self.ple_width,)
        shapes["norm"] = (self.dim,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, self.dim)
        if "head" in self.biases:
            shapes["head.bias"] = (self.vocab_size,)
        return shapes

    def row_parts(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that make up a row of the tables.

        An expert has two: gate and up with their rows alternating, and down.
        """
        if self.stem_ffn == "hash-moe":
            return (2 * self.d_ff, self.dim), (self.dim, self.d_ff)
        return ((self.ple_width or self.row_rank or self.d_ff,),)

    def dense_twin(self) -> ModelConfig:
        """This model with up projections in all layers, and no tables."""
        return msgspec.structs.replace(
            self,
            stem_layers=(),
            stem_ffn="stem",
            row_rank=0,
            n_experts=0,
            ple_width=0,
            ple_records=0,
        )

    @property
    def records(self) -> int:
        """Records in the table store: one per token, or one per expert."""
        return self.n_experts or self.ple_records or self.vocab_size

    @property
    def record_values(self) -> int:
        """Values in one record."""
        return sum(map(prod, self.row_parts())) * len(self.stem_layers)

    @property
    def table_parameters(self) -> int:
        """Parameters in the tables."""
        return self.records * self.record_values

    @property
    def backbone_parameters(self) -> int:
        """Parameters outside the tables."""
        return sum(map(prod, self.backbone_shapes().values()))

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: backbone (with one row of its embedding) and a record."""
        embedding = 0 if self.tied_head else (self.vocab_size - 1) * self.dim
        return self.backbone_parameters - embedding + self.record_values


def _check_scaling(scaling: RopeScaling) -> None:
    for field in scaling.__struct_fields__:
        value = getattr(scaling, field)
        if not isinstance(value, bool) and not LEAST_SCALING <= value <= MAX_CONTEXT:
            raise ValueError(
                f"{field} of the RoPE scaling is {value}; "
                f"expected {LEAST_SCALING:g} to {MAX_CONTEXT}"
            )
    if isinstance(scaling, ProportionalRope) and scaling.share > 1:
        raise ValueError(f"share of the proportional RoPE is {scaling.share}; expected up to 1")
    if not 1 <= scaling.factor <= MAX_FACTOR:
        raise ValueError(
            f"factor of the RoPE scaling is {scaling.factor}; expected 1 to {MAX_FACTOR}"
        )
    if isinstance(scaling, Llama3Rope) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError("low_freq_factor of the RoPE scaling is not below high_freq_factor")

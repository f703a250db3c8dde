"""The description of a decoder-only transformer with RMS norms, RoPE and gated FFNs.

Exporter, reference model and runtime use only this description to know what a model computes.
To support a new architecture, write a checkpoint reader that fills it in.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from stem_edge.layers import Activation, Layer, LayerKind, Rope, RopeScaling


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A transformer's layers, their sizes and table rows. Comments explain the fields."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    stem_layers: tuple[int, ...]  # layers that look up rows of the tables, ascending
    norm_eps: float
    rope_theta: float
    max_context: int  # tokens the model was built for
    stem_ffn: str = "stem"  # what the FFNs of STEM layers compute: a key of FFN_TERMS
    row_rank: int = 0  # low-rank tables: the row is P E[t], E on flash; 0: the row is U[t]
    # Number of last tokens of a document whose rows are averaged; 0: only the token's own row.
    row_window: int = 0
    # Number of rows that a token has in each layer, mixed by a router in the layer; 0: one row.
    row_experts: int = 0
    # n-gram tables, averaged with the input embedding (LongCat, arXiv 2601.21204) or added before
    # stem_layers (Engram, arXiv 2601.07372).
    ngram_order: int = 0  # n-grams have 2 to ngram_order ids; 0: no n-grams
    ngram_sizes: tuple[int, ...] = ()  # rows of each table; each length has as many tables
    ngram_end: int | None = None  # id that ends a document
    # Engram: multipliers of the ids in each of its layers, newest id first.
    ngram_multipliers: tuple[tuple[int, ...], ...] = ()
    ngram_filler: int = 0  # Engram: id used for positions before a document
    engram_kernel: int = 0  # tokens in its convolution, ngram_order apart; 0: no convolution
    n_experts: int = 0  # hash-moe: records, each shared by many tokens
    tied_head: bool = False
    rope_interleaved: bool = True  # pairs (0,1), (2,3)... as in the STEM trainer; False: halves
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # tokens that attention sees, the current one included; 0: all
    window_layers: tuple[int, ...] | None = None  # layers with the sliding window; None: all
    qk_norm_eps: float | None = None  # of the RMS norm of q and k heads before RoPE; None: no norm
    post_norms: bool = False  # an RMS norm after attention and after the FFN, too
    biases: tuple[str, ...] = ()  # matrices with a bias, a subset of BIASED
    logit_softcap: float = 0.0  # logits become cap * tanh(logits / cap); 0: no cap
    layer_kinds: tuple[LayerKind, ...] = ()  # layers that differ from the rest
    # Number of last layers without K and V. Each uses K and V of the last earlier layer with its RoPE and window.
    borrowed_kv_layers: int = 0
    embedding_scale: float = 1.0  # factor of hidden states that come from the embedding
    activation: Activation = "silu"
    attention_scale: float = 0.0  # factor of scores; 0: 1 / sqrt(head_dim)
    v_norm: bool = False  # an RMS norm of v heads, without a weight
    layer_scale: bool = False  # hidden states after a layer are multiplied by the layer's factor
    ple_width: int = 0  # per-layer embeddings: values of a row
    ple_scale: float = 1.0  # per-layer embeddings: factor of rows that come from the tables
    # Per-layer embeddings: number of ids with their own rows, other ids use row 0; 0: all ids.
    ple_records: int = 0
    # AltUp (arXiv 2301.13310): a token has several hidden states. One goes through attention and
    # FFN, and the others are predicted from it; all but the first get per-layer embeddings.
    streams: int = 1
    active_stream: int = 0  # index of the stream that goes through attention and FFN
    ple_gate_scale: bool = False  # True: a vector scales the active stream before the gate
    laurel_rank: int = 0  # rank of a low-rank product parallel to attention; 0: none
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    placeholders: dict[str, int] = {}  # "an image" or the like -> id of the token in its place
    # Matrix, or "head" -> (step of its input, step of its result): activations are rounded to int8
    # multiples of the step; 0: not rounded.
    ranges: dict[str, tuple[float, float]] = {}

    def ffn_kind(self, layer: int) -> str:
        return self.stem_ffn if layer in self.stem_layers else "dense"

    def window(self, layer: int) -> int:
        """Return how many tokens the attention of a layer sees; 0 means all tokens."""
        everywhere = self.window_layers is None or layer in self.window_layers
        return self.sliding_window if everywhere else 0

    def layer(self, number: int) -> Layer:
        return self.layers[number]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers. Raises ValueError if a layer cannot borrow the K and V that it lacks."""
        layers, lenders = list[Layer](), dict[tuple[Rope, int, int], int]()
        for number in range(self.n_layers):
            layer = self._own_layer(number)
            kind = layer.rope, layer.window, layer.n_kv_heads
            if number < self.own_kv_layers:
                lenders[kind] = number
            elif kind not in lenders:
                raise ValueError(
                    f"layer {number} has no K and V, and no layer before it has its kind"
                )
            layers.append(msgspec.structs.replace(layer, kv_layer=lenders[kind]))
        return tuple(layers)

    def _own_layer(self, number: int) -> Layer:
        """Describe a layer as if it computed its own K and V, even if it borrows them."""
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
        sparsity = next((kind.sparsity for kind in kinds if kind.sparsity), 0.0)
        return Layer(rope.width, heads, own("d_ff"), rope, window, number, sparsity)

    @property
    def hidden_width(self) -> int:
        """Number of values in a token's hidden state between layers: AltUp streams times `dim`."""
        return self.streams * self.dim

    @property
    def lookups(self) -> int:
        """Number of records that one token looks up: 1, or with n-grams one per n-gram table."""
        return len(self.ngram_sizes) or 1

    @property
    def row_layers(self) -> tuple[int, ...]:
        """Layers that have a row in each record: all STEM layers; with n-grams only the first."""
        return self.stem_layers[:1] if self.ngram_order else self.stem_layers

    @property
    def conv_layers(self) -> tuple[int, ...]:
        """Layers with a convolution (Engram), which also needs its inputs of earlier tokens."""
        return self.stem_layers if self.engram_kernel else ()

    @property
    def mixed_rows(self) -> int:
        """Number of rows that a token has in one layer; above 1 only if a router mixes rows."""
        return self.row_experts or 1

    @property
    def own_kv_layers(self) -> int:
        """Number of layers with their own K and V: all but the last `borrowed_kv_layers`."""
        return self.n_layers - self.borrowed_kv_layers

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Distinct RoPE parameters of all layers, in the order of their first use."""
        return tuple(dict.fromkeys(self.layer(number).rope for number in range(self.n_layers)))

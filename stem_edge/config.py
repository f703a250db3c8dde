"""A checked model description, with the shapes and sizes of its tensors."""

from __future__ import annotations

from math import prod

from stem_edge.config_check import check_config
from stem_edge.description import Description
from stem_edge.layers import FFN_TERMS, LENT
from stem_edge.limits import MAX_PARAMETERS


class ModelConfig(Description, frozen=True):
    """A checked model description. Raises ValueError if its fields contradict each other."""

    def __post_init__(self) -> None:
        check_config(self)
        if (count := self.backbone_parameters) > MAX_PARAMETERS:
            raise ValueError(f"a backbone of {count} parameters; expected at most {MAX_PARAMETERS}")
        if self.ranges:
            shapes = self.backbone_shapes()
            from stem_edge.special import check_ranges  # for such models alone

            matrices = {name for name, shape in shapes.items() if len(shape) == 2} | {"head"}
            check_ranges(self.ranges, matrices - {"embedding"})

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of a layer's backbone tensors; matrices are [outputs, inputs]."""
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
        if self.row_experts and layer in self.stem_layers:
            shapes["router"] = (self.row_experts, self.dim)
        if any("mix" in parts for parts in terms.values()):
            shapes["mix"] = (1,)
        if self.ngram_order or self.ple_width or self.streams > 1 or self.laurel_rank:
            from stem_edge.special import more_shapes  # for such models alone

            shapes |= more_shapes(self, layer)
        if self.layer_scale:
            shapes["layer_scale"] = (1,)
        biased = [name for name in shapes if name in self.biases]
        return shapes | {f"{name}.bias": shapes[name][:1] for name in biased}

    def backbone_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every backbone tensor; matrices are [outputs, inputs]."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.dim)}
        for stream in range(1, self.streams):
            square = self.dim, self.dim
            shapes |= {f"streams.{stream}.altup_{end}": square for end in ("in", "out")}
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
        """Return the shapes of the arrays that make up a table row.

        In hash-moe, a row is an expert: gate and up interleaved row by row, then down. Any other
        row is one vector. If a router mixes rows, the vector contains all of them, side by side.
        """
        if self.stem_ffn == "hash-moe":
            return (2 * self.d_ff, self.dim), (self.dim, self.d_ff)
        return ((self.mixed_rows * (self.ple_width or self.row_rank or self.d_ff),),)

    @property
    def records(self) -> int:
        """Number of records in the table store: one per token, per expert or per n-gram row."""
        return self.n_experts or self.ple_records or self.table_ids

    @property
    def table_ids(self) -> int:
        """Number of ids that select rows: the token ids, or the row numbers of n-gram tables."""
        return sum(self.ngram_sizes) or self.vocab_size

    @property
    def record_values(self) -> int:
        return sum(map(prod, self.row_parts())) * len(self.row_layers)

    @property
    def table_parameters(self) -> int:
        return self.records * self.record_values

    @property
    def backbone_parameters(self) -> int:
        return sum(map(prod, self.backbone_shapes().values()))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses. Of an untied embedding, only one row counts."""
        embedding = 0 if self.tied_head else (self.vocab_size - 1) * self.dim
        return self.backbone_parameters - embedding + self.lookups * self.record_values

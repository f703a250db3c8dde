"""The model description that exporter, reference model and runtime share."""

from __future__ import annotations

import msgspec

# Far above any published model; a damaged or hostile number is refused before it sizes an array.
MAX_VOCAB = 1 << 24
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 24


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a decoder-only transformer with SwiGLU FFNs, some of them STEM layers.

    A STEM layer has no up projection: `y = W_down (SiLU(W_gate x) * U_l[t])` (STEM paper, eq. 4).
    Raises ValueError when the numbers contradict each other.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    stem_layers: tuple[int, ...]  # ascending
    norm_eps: float
    rope_theta: float
    max_context: int  # tokens the model was built for
    tied_head: bool = False
    rope_interleaved: bool = True  # pairs (0,1), (2,3)... as in the STEM trainer; False: halves
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_range("vocab_size", MAX_VOCAB)
        self._check_range("n_layers", MAX_LAYERS)
        self._check_range("max_context", MAX_CONTEXT)
        for field in ("dim", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            self._check_range(field, MAX_WIDTH)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")
        if not (0 < self.norm_eps < 1 and 0 < self.rope_theta < float("inf")):
            raise ValueError(
                f"norm_eps {self.norm_eps} or rope_theta {self.rope_theta} out of range"
            )
        self._check_ids()

    def _check_range(self, field: str, largest: int) -> None:
        value = getattr(self, field)
        if not 0 < value <= largest:
            raise ValueError(f"{field} is {value}; expected 1 to {largest}")

    def _check_ids(self) -> None:
        if list(self.stem_layers) != sorted(set(self.stem_layers)):
            raise ValueError(f"stem_layers {self.stem_layers} is not ascending without repeats")
        if (
            self.stem_layers
            and not 0 <= self.stem_layers[0] <= self.stem_layers[-1] < self.n_layers
        ):
            raise ValueError(
                f"stem_layers {self.stem_layers} outside of the {self.n_layers} layers"
            )
        for token in (*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"special token id {token} outside of vocab_size {self.vocab_size}"
                )

    def backbone_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every backbone tensor, matrices as [outputs, inputs]."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            at = f"layers.{layer}."
            shapes |= {
                at + "attention_norm": (self.dim,),
                at + "wq": (q, self.dim),
                at + "wk": (kv, self.dim),
                at + "wv": (kv, self.dim),
                at + "wo": (self.dim, q),
                at + "ffn_norm": (self.dim,),
                at + "gate": (self.d_ff, self.dim),
                at + "down": (self.dim, self.d_ff),
            }
            if layer not in self.stem_layers:
                shapes[at + "up"] = (self.d_ff, self.dim)
        shapes["norm"] = (self.dim,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, self.dim)
        return shapes

    @property
    def table_parameters(self) -> int:
        """Parameters in the tables."""
        return self.vocab_size * self.d_ff * len(self.stem_layers)

    @property
    def backbone_parameters(self) -> int:
        """Parameters outside of the tables."""
        total = 0
        for shape in self.backbone_shapes().values():
            total += shape[0] * (shape[1] if len(shape) == 2 else 1)
        return total

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: the backbone (one row of its embedding) and one record."""
        embedding = 0 if self.tied_head else (self.vocab_size - 1) * self.dim
        return self.backbone_parameters - embedding + self.d_ff * len(self.stem_layers)

"""Gemma in GGUF files: gemma3, gemma3n and gemma4, as llama.cpp's converter writes them.

Norms have their 1 in the file. No key holds Gemma 3's factor of scores, so it is that of llama.cpp,
and embeddings are scaled by the square root of their width, not rounded to the type of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.gguf_keys import ROPE_FACTORS, Keys, Tensors
from stem_edge.export.checkpoints.hugging_face.gemma3n import OWN_LAYER, groups
from stem_edge.export.checkpoints.hugging_face.gemma_ple import PLE_LAYER, TOP
from stem_edge.export.checkpoints.hugging_face.names import Names
from stem_edge.export.tensor_files.gguf_tensor import flat, gguf_columns
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.layers import LENT, LayerKind, ProportionalRope, RopeScaling
from stem_edge.numerics.matrix import whole

TABLE, CONTEXT = "per_layer_token_embd.weight", "per_layer_model_proj.weight"
LAYERS_27B = 62  # by which llama.cpp knows the model whose scores have another factor
# Parts of Gemma 3n that no backbone.gguf has.
ALTUP = {
    "altup_norm": "altup_router_norm",
    "altup_router": "altup_router",
    "altup_predict": "altup_predict_coef",
    "altup_correct": "altup_correct_coef",
    "ple_gate_scale": "altup_correct_scale",
    "laurel_in": "laurel_l",
    "laurel_out": "laurel_r",
    "laurel_norm": "laurel_post_norm",
}
STREAMS = {"altup_in": "altup_proj.weight", "altup_out": "altup_unembd_proj.weight"}
LARGE = 1e20  # factors above it leave nothing of a rotation

T = TypeVar("T")


class Gemma3Keys(Keys, kw_only=True):
    """Keys of gemma3, and what the others have, too."""

    ignored = Keys.ignored | {"mm.tokens_per_image"}
    modules = Names(TOP, PLE_LAYER)
    PATTERN: ClassVar[int] = 6  # without a pattern, one layer in this many has full attention
    feed_forward_length: int | list[int]  # type: ignore[assignment]
    attention__head_count_kv: int | list[int] | None = None  # type: ignore[assignment]
    attention__sliding_window_pattern: int | list[bool] = 0
    rope__freq_base_swa: float = 10_000.0
    rope__dimension_count_swa: int | None = None
    final_logit_softcapping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (found := self.rope__dimension_count_swa) not in (None, self.window_width):
            raise ValueError(f"rope.dimension_count_swa is {found}; expected {self.window_width}")

    @property
    def window_width(self) -> int:
        """Width of a head in layers with a window."""
        return self.head_dim

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        kv = self.attention__head_count_kv or self.attention__head_count
        widths, heads = self._each(self.feed_forward_length), self._each(kv)
        return self._windows() | {
            "d_ff": widths[0],
            "n_kv_heads": heads[0],
            "rope_theta": self.rope__freq_base_swa,
            "rope_scaling": None,
            "layer_kinds": (
                LayerKind(
                    layers=self.full(),
                    rope_theta=self.rope__freq_base,
                    rope_scaling=self.full_rope(tensors),
                ),
                *(LayerKind(layers=l, d_ff=n) for n, l in _others(widths).items()),
                *(LayerKind(layers=l, n_kv_heads=n) for n, l in _others(heads).items()),
            ),
            "embedding_scale": _root(self.embedding_length),
            "activation": "gelu",
            "attention_scale": self.attention_scale(),
            "qk_norm_eps": self.attention__layer_norm_rms_epsilon,
            "post_norms": True,
            "logit_softcap": self.final_logit_softcapping,
        }

    def attention_scale(self) -> float:
        """Return the factor of scores."""
        width = self.embedding_length / self.attention__head_count
        return 1 / math.sqrt(width if self.block_count == LAYERS_27B else self.head_dim)

    def full_rope(self, tensors: Tensors) -> RopeScaling | None:
        """Return the scaling in layers with full attention. Raises ValueError."""
        return self.rope()

    def full(self) -> tuple[int, ...]:
        """Return the layers with full attention."""
        given, layers = self.attention__sliding_window_pattern or self.PATTERN, self.block_count
        if not self.attention__sliding_window:
            return tuple(range(layers))
        if isinstance(given, int):
            return tuple(range(given - 1, layers, given))
        return tuple(number for number, sliding in enumerate(self._each(given)) if not sliding)

    def _windows(self) -> dict[str, Any]:
        full = {*self.full()}
        layers = tuple(number for number in range(self.block_count) if number not in full)
        if not layers:
            return {"sliding_window": 0}
        return {"window_layers": layers} if full else {}

    def _each(self, given: Any) -> Sequence[Any]:
        """Return the value of each layer. Raises ValueError."""
        if not isinstance(given, list):
            return [given] * self.block_count
        if len(given) != self.block_count:
            raise ValueError(
                f"{len(given)} values are given for {self.block_count} layers; expected one for each"
            )
        return given


class PleKeys(Gemma3Keys, kw_only=True):
    """Keys that gemma3n and gemma4 share."""

    KEYS_ARE_VALUES: ClassVar[bool] = False  # in layers without a matrix for V
    embedding_length_per_layer_input: int = 0
    attention__shared_kv_layers: int = 0

    def attention_scale(self) -> float:
        return 1.0

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        extras = super().extras(tensors) | {
            "borrowed_kv_layers": self.attention__shared_kv_layers,
            "v_norm": True,
        }
        width = self.embedding_length_per_layer_input
        if not width:
            return extras
        if TABLE not in tensors:
            raise ValueError(f"no tensor {TABLE}")
        records = tensors[TABLE].shape[0]
        return extras | {
            "stem_layers": tuple(range(self.block_count)),
            "stem_ffn": "ple",
            "ple_width": width,
            "ple_scale": _root(width),
            "ple_records": 0 if records == tensors[gguf_name("embedding")].shape[0] else records,
        }

    def tensor(self, name: str) -> str:
        at, _, part = name.rpartition(".")
        if part in ALTUP:
            return f"blk.{at.split('.')[1]}.{ALTUP[part]}.weight"
        return super().tensor(name)

    def backbone(self, config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
        stacked = self._stacked(config, tensors)
        found: dict[str, Tensor] = {}
        for name in config.backbone_shapes():
            at, _, part = name.rpartition(".")
            if part in stacked:
                number, rows = int(at.split(".")[1]), config.dim
                number, rows = (number, config.ple_width) if at[0] == "l" else (number - 1, rows)
                found[name] = stacked[part].part(number * rows, (number + 1) * rows)
            elif self.tensor(name) in tensors:
                found[name] = tensors.pop(self.tensor(name))
            elif part == "wv" and self.KEYS_ARE_VALUES and f"{at}.wk" in found:
                found[name] = found[f"{at}.wk"]
        for layer in range(config.own_kv_layers, config.n_layers):
            for part in LENT:  # which files have, though nothing reads them
                tensors.pop(gguf_name(f"layers.{layer}.{part}"), None)
        return found

    def _stacked(self, config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
        """Take tensors that hold a matrix of each layer or stream: part -> rows of all."""
        dim, rows = config.dim, config.n_layers * config.ple_width
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        shapes |= {"ple_context": (CONTEXT, (rows, dim))} if rows else {}
        streams = config.streams - 1, dim, dim
        shapes |= {part: (name, streams) for part, name in STREAMS.items() if config.streams > 1}
        return {part: flat(_take(tensors, *of)) for part, of in shapes.items()}

    def tables(self, config: ModelConfig, tensors: Tensors) -> dict[int, Tensor]:
        width = config.ple_width
        if not width:
            return {}
        table = _take(tensors, TABLE, (config.records, config.n_layers * width))
        return dict(zip(config.stem_layers, gguf_columns(table, width), strict=True))

    def index(self, config: ModelConfig) -> npt.NDArray[np.int32] | None:
        ids = np.arange(config.vocab_size, dtype=np.int32)
        known = ids < config.ple_records
        return np.where(known, ids, np.int32(0)) if config.ple_records else None


class Gemma3nKeys(PleKeys, kw_only=True):
    """Keys of gemma3n."""

    modules = Names(TOP, OWN_LAYER)
    PATTERN = 5
    final_logit_softcapping: float = 30.0  # which older files do not say
    altup__num_inputs: int = 4
    altup__active_idx: int = 0
    activation_sparsity_scale: float | list[float] = -math.inf

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        extras, laurel = super().extras(tensors), f"blk.0.{ALTUP['laurel_in']}.weight"
        if laurel not in tensors:
            raise ValueError(f"no tensor {laurel}")
        scales = self._each(self.activation_sparsity_scale)
        if any(map(math.isnan, scales)):
            raise ValueError("activation_sparsity_scale has nan; expected standard deviations")
        sparse = groups([round(NormalDist().cdf(scale), 6) for scale in scales])
        return extras | {
            "layer_kinds": (
                *extras["layer_kinds"],
                *(LayerKind(layers=l, sparsity=share) for share, l in sparse.items() if share),
            ),
            "streams": self.altup__num_inputs,
            "active_stream": self.altup__active_idx,
            "ple_gate_scale": f"blk.0.{ALTUP['ple_gate_scale']}.weight" in tensors,
            "laurel_rank": tensors[laurel].shape[0],
        }


class Gemma4Keys(PleKeys, kw_only=True):
    """Keys of gemma4; its sizes of heads are those of layers with full attention."""

    KEYS_ARE_VALUES = True
    attention__key_length_swa: int | None = None
    attention__value_length_swa: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (found := self.attention__value_length_swa) not in (None, self.window_width):
            raise ValueError(f"attention.value_length_swa is {found}; expected {self.window_width}")

    @property
    def window_width(self) -> int:
        return self.attention__key_length_swa or self.head_dim

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        extras = super().extras(tensors)
        return extras | {
            "head_dim": self.window_width,
            "layer_kinds": (
                *extras["layer_kinds"],
                LayerKind(layers=self.full(), head_dim=self.head_dim),
            ),
            "layer_scale": gguf_name("layers.0.layer_scale") in tensors,
        }

    def full_rope(self, tensors: Tensors) -> RopeScaling | None:
        factors = tensors.pop(ROPE_FACTORS, None)
        if factors is None:
            return self.rope()
        if self.rope() is not None:
            raise ValueError(f"both rope.scaling and {ROPE_FACTORS} are given; expected one")
        values = whole(factors)
        turning = int((values == 1).sum())
        fits = factors.shape == (self.head_dim // 2,) and (values[:turning] == 1).all()
        if not fits or not (values[turning:] > LARGE).all():
            raise ValueError(
                f"{ROPE_FACTORS} {list(factors.shape)} has factors other than Gemma 4's: 1 for the "
                f"first of [{self.head_dim // 2}], above {LARGE:g} for the others"
            )
        return ProportionalRope(turning / len(values))


def _take(tensors: Tensors, name: str, expected: tuple[int, ...]) -> Tensor:
    """Take a tensor of this shape. Raises ValueError."""
    found = tensors.pop(name, None)
    if found is None or found.shape != expected:
        shown = "missing" if found is None else list(found.shape)
        raise ValueError(f"{name} is {shown}; expected {list(expected)}")
    return found


def _root(width: int) -> float:
    return float(np.float32(math.sqrt(width)))


def _others(values: Sequence[T]) -> dict[T, tuple[int, ...]]:
    """Return the groups but that of the first layer."""
    return {value: layers for value, layers in groups(values).items() if value != values[0]}

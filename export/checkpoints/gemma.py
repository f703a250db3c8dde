"""Reading Gemma 4: config.json of the text model, alone or in a multimodal one, and its tensors.

Layers of full attention have heads and RoPE of their own. The last layers borrow K and V from
earlier ones, and may have a wider FFN. A row of the table of per-layer embeddings holds the rows of
one token in all layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints import hf_config
from stem_edge.export.checkpoints.checkpoint import SourceMatrix
from stem_edge.export.checkpoints.hf_config import (
    FULL,
    NAMES,
    SLIDING,
    Names,
    Windowed,
    tensor_name,
)
from stem_edge.export.checkpoints.rope import read_rope
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.stored_tensor import StoredTensor
from stem_edge.layers import LayerKind, RopeScaling

TABLE = "embed_tokens_per_layer.weight"
CONTEXT = "per_layer_model_projection.weight"
TOP = {
    "embedding": "embed_tokens",
    "norm": "norm",
    "ple_norm": "per_layer_projection_norm",
}
LAYER = hf_config.LAYER | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "ple_gate": "per_layer_input_gate",
    "ple_out": "per_layer_projection",
    "ple_post_norm": "post_per_layer_input_norm",
}
# The defaults of transformers.
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
BORROWED = r"layers\.(\d{1,4})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
PATTERN = 6  # without layer_types, every sixth layer has full attention
MULTIMODAL_INSIDE = "model.language_model."
# What a token stands for -> key of config.json with its id, and the id without that key.
PLACEHOLDERS = {
    "an image": ("image_token_id", 258_880),
    "a video": ("video_token_id", 258_884),
    "sound": ("audio_token_id", 258_881),
}
MULTIMODAL = (
    *("audio_config", "vision_config", "vision_soft_tokens_per_image"),
    *(key for key, _ in PLACEHOLDERS.values()),
    *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id"),
    *("audio_token_index", "eoi_token_index", "eoa_token_index"),
)
# Modules of a multimodal checkpoint that text does not need.
TOWERS = re.compile(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..+")


class Gemma4(Windowed, kw_only=True, dict=True):
    """Keys of config.json, or of its text_config."""

    # No keys of config.json: `outer` sets them for a multimodal model.
    inside: ClassVar[str] = NAMES.inside  # prefix of the names of tensors
    placeholders: ClassVar[Mapping[str, int]] = {}  # what a token stands for -> its id
    vocab_size: int = 262_144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    max_position_embeddings: int = 131_072
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = 262_144
    hidden_size_per_layer_input: int = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    per_layer_config: dict[str, dict[str, int]] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, wanted in (
            ("enable_moe_block", (False,)),
            ("hidden_activation", ("gelu_pytorch_tanh",)),
            ("attention_bias", (False,)),
            ("use_bidirectional_attention", (None, "vision")),
            ("rope_theta", (None,)),
            ("rope_scaling", (None,)),
        ):
            if (found := getattr(self, key)) not in wanted:
                raise ValueError(
                    f"{key} is {one_line(repr(found))}; of Gemma 4 models, only those with "
                    f"{' or '.join(map(repr, wanted))} are supported"
                )

    @classmethod
    def text(cls, given: dict[str, Any]) -> dict[str, Any]:
        text = given.get("text_config")
        if given.get("model_type") != "gemma4" or not isinstance(text, dict):
            return given
        outside = given.keys() - {"text_config", *MULTIMODAL}
        # Null says nothing, so it must not hide the dtype of the whole.
        stated = {key: value for key, value in text.items() if value is not None}
        return {key: given[key] for key in outside} | stated

    def outer(self, given: dict[str, Any]) -> None:
        if given.get("model_type") != "gemma4" or "text_config" not in given:
            return
        ids = {what: given.get(key, usual) for what, (key, usual) in PLACEHOLDERS.items()}
        self.__dict__["inside"] = MULTIMODAL_INSIDE
        found = {what: number for what, number in ids.items() if isinstance(number, int)}
        self.__dict__["placeholders"] = found

    def notes(self) -> tuple[str, ...]:
        towers = "only the text model is exported: what sees images and hears sound is left out"
        return (towers,) if self.inside == MULTIMODAL_INSIDE else ()

    def read_rope(self) -> tuple[float, RopeScaling | None]:
        return self._rope_of(SLIDING)

    def _rope_of(self, kind: str) -> tuple[float, RopeScaling | None]:
        ropes = self.rope_parameters or ROPES
        found = ropes.get(kind)
        if not isinstance(found, dict):
            message = f"rope_parameters has {one_line(repr(ropes))}; expected {kind} in it"
            raise ValueError(message)  # noqa: TRY004
        return read_rope(None, None, found, self.max_position_embeddings)

    def extras(self) -> dict[str, Any]:
        layers, width = self.num_hidden_layers, self.hidden_size_per_layer_input
        pattern = [FULL if (n + 1) % PATTERN == 0 else SLIDING for n in range(layers)]
        self.layer_types = [*(self.layer_types or pattern)[:-1], FULL]  # transformers does so, too
        extras = self.windows(pattern) | {
            "layer_kinds": tuple(self._kinds()),
            "borrowed_kv_layers": self.num_kv_shared_layers,
            "embedding_scale": self._rounded(math.sqrt(self.hidden_size)),
            "activation": "gelu",
            "attention_scale": 1.0,
            "qk_norm_eps": self.rms_norm_eps,
            "v_norm": True,
            "post_norms": True,
            "layer_scale": True,
            "logit_softcap": self.final_logit_softcapping or 0.0,
            # Not those beyond the vocabulary, because no prompt can have them.
            "placeholders": {
                k: n for k, n in self.placeholders.items() if 0 <= n < self.vocab_size
            },
        }
        if not width:
            return extras
        records = self.vocab_size_per_layer_input
        return extras | {
            "stem_layers": tuple(range(layers)),
            "stem_ffn": "ple",
            "ple_width": width,
            "ple_scale": self._rounded(math.sqrt(width)),
            "ple_records": 0 if records == self.vocab_size else records,
        }

    def _kinds(self) -> Iterator[LayerKind]:
        """Yield how layers of full attention, and those with borrowed K and V, differ."""
        full = tuple(n for n, kind in enumerate(self.layer_types or []) if kind == FULL)
        theta, scaling = self._rope_of(FULL)
        yield LayerKind(layers=full, rope_theta=theta, rope_scaling=scaling)
        for own, layers in self._own_heads(full).items():
            yield LayerKind(layers=tuple(layers), head_dim=own[0], n_kv_heads=own[1])
        if self.use_double_wide_mlp and self.num_kv_shared_layers:
            borrowing = range(self.num_hidden_layers)[-self.num_kv_shared_layers :]
            yield LayerKind(layers=tuple(borrowing), d_ff=2 * self.intermediate_size)

    def _own_heads(self, full: tuple[int, ...]) -> dict[tuple[int, int], list[int]]:
        """Return head_dim and n_kv_heads -> layers that have these; 0: the model's."""
        given = self.per_layer_config
        if given is None:
            heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            return {(self.global_head_dim, heads or 0): list(full)}
        found: dict[tuple[int, int], list[int]] = {}
        for number, own in given.items():
            if own.keys() - {"head_dim", "num_key_value_heads"} or not number.isdecimal():
                raise ValueError(
                    f"per_layer_config has {one_line(repr({number: own}))}; expected layers with "
                    "head_dim or num_key_value_heads"
                )
            sizes = own.get("head_dim", 0), own.get("num_key_value_heads", 0)
            found.setdefault(sizes, []).append(int(number))
        return {sizes: sorted(layers) for sizes, layers in found.items()}

    def _rounded(self, scale: float) -> float:
        """Round a factor to the type of the weights, because transformers does so."""
        wide = np.array(scale, np.float32)
        kind = self.dtype or self.torch_dtype
        if kind is None:
            raise ValueError(
                "no dtype, by whose rounding embeddings are scaled; add that of the weights"
            )
        if kind == "float16":
            return float(wide.astype(np.float16))
        if kind != "bfloat16":
            return float(wide)
        bits = wide.view(np.uint32) + np.uint32(0x7FFF)  # square roots are never ties
        return float((bits & np.uint32(0xFFFF0000)).view(np.float32))

    def names(self) -> Names:
        return Names(TOP, LAYER, self.inside)

    def backbone(self, config: ModelConfig, files: TensorFiles) -> dict[str, SourceMatrix]:
        inside = f"{self.inside}layers"
        found: dict[str, SourceMatrix] = {}
        shapes = config.backbone_shapes()
        context, width = None, config.n_layers * config.ple_width
        if width:
            context = self._take(files, CONTEXT, (width, config.dim))
        for name in shapes:
            _, _, part = name.rpartition(".")
            number = name.split(".")[1] if part != name else ""
            if part == "ple_context" and context is not None:
                start = int(number) * config.ple_width
                found[name] = context.part(start, start + config.ple_width)
            elif part == "layer_scale":
                found[name] = files.take(f"{inside}.{number}.layer_scalar")
            elif part == "wv" and self._keys_are_values(config, int(number)):
                found[name] = found[name.replace("wv", "wk")]
            else:
                found[name] = files.take(tensor_name(name, self.names()))
        return found

    def _keys_are_values(self, config: ModelConfig, layer: int) -> bool:
        return self.attention_k_eq_v and not config.window(layer)

    def tables(self, config: ModelConfig, files: TensorFiles) -> dict[int, SourceMatrix]:
        if not config.ple_width:
            return {}
        width = config.ple_width
        table = self._take(files, TABLE, (config.records, config.n_layers * width))
        return {
            layer: table.columns(layer * width, (layer + 1) * width) for layer in config.stem_layers
        }

    def _take(self, files: TensorFiles, name: str, expected: tuple[int, int]) -> StoredTensor:
        """Take a tensor that holds something of every layer. Raises CheckpointError."""
        tensor = files.take(self.inside + name)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} is {list(tensor.shape)}; expected {list(expected)}, as "
                "config.json says: check that both are of the same run"
            )
        return tensor

    def index(self, config: ModelConfig, files: TensorFiles) -> npt.NDArray[np.int32] | None:
        """Return the record of each token [V]; those beyond the table have its first."""
        if not config.ple_records:
            return None
        ids = np.arange(config.vocab_size, dtype=np.int32)
        return np.where(ids < config.ple_records, ids, np.int32(0))

    def unused(self, name: str) -> bool:
        """Return True for towers, and for tensors of K and V in layers that borrow them.

        transformers does not load the latter, either.
        """
        found = re.fullmatch(re.escape(self.inside) + BORROWED, name)
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return bool(found and own <= int(found[1]) < self.num_hidden_layers) or bool(
            self.inside != NAMES.inside and TOWERS.fullmatch(name)
        )

"""Converts config.json of Hugging Face models to a ModelConfig.

To add a family of dense models, add a class here, an entry in KINDS (reader.py), and an entry in
ARCHITECTURES (../gguf_keys.py) for GGUF files. keys.py decides about keys that are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.hugging_face.keys import CODE, check_keys
from stem_edge.export.checkpoints.hugging_face.names import NAMES, Names, tensor_name
from stem_edge.export.checkpoints.hugging_face.packed import GEMMA, QUANTIZED
from stem_edge.export.checkpoints.hugging_face.rope import read_rope
from stem_edge.export.tensor_files.json import (
    Heads,
    Layers,
    convert_options,
    one_line,
    read_json,
)
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.layers import RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
QUANTIZERS = (QUANTIZED, "compression_config", "quantization")


class Decoder(msgspec.Struct, kw_only=True):
    """Keys of config.json that all model families share, with the defaults of transformers."""

    packable: ClassVar[bool] = False  # True for families that may have the quant_method "gemma"
    known_as: ClassVar[str] = ""  # model_type under which keys.json lists the keys, if different
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    def read_rope(self) -> tuple[float, RopeScaling | None]:
        return read_rope(
            self.rope_theta, self.rope_scaling, self.rope_parameters, self.max_position_embeddings
        )

    def extras(self) -> dict[str, Any]:
        """Return ModelConfig fields that this family adds or changes: name -> value."""
        return {}

    @classmethod
    def text(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of `given` (a config.json) that describe the text model, even if nested."""
        return given

    def outer(self, given: dict[str, Any]) -> tuple[str, ...]:
        """Read keys of config.json outside the text model; return notes for the user."""
        return ()

    def names(self) -> Names:
        """Return the names of this family's modules in Hugging Face's files."""
        return NAMES

    def backbone(self, config: ModelConfig, files: TensorFiles) -> dict[str, Tensor]:
        """Take the backbone's tensors from `files`; return this project's name -> tensor."""
        return {name: files.take(self.tensor(name)) for name in config.backbone_shapes()}

    def tensor(self, name: str) -> str:
        return tensor_name(name, self.names())

    def widths(self, config: ModelConfig) -> dict[str, int]:
        """Return the number of columns of each matrix, by its name in Hugging Face's files."""
        shapes = config.backbone_shapes().items()
        found = {self.tensor(name): shape[1] for name, shape in shapes if len(shape) == 2}
        return found | {tensor_name("head"): config.dim}

    def tables(self, config: ModelConfig, files: TensorFiles) -> dict[int, Tensor]:
        """Take the tables from `files`; return index of a STEM layer -> its table."""
        return {}

    def index(self, config: ModelConfig, files: TensorFiles) -> npt.NDArray[np.int32] | None:
        """Return the row number of each token in the tables [V]; None if token i has row i."""
        return None

    def unused(self, name: str) -> bool:
        """Return True for the name of a tensor that models of this family never need."""
        return False

    def model(self) -> ModelConfig:
        """Return the ModelConfig that these keys of config.json describe. Raises ValueError."""
        theta, scaling = self.read_rope()
        fields: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "dim": self.hidden_size,
            "n_layers": self.num_hidden_layers,
            "n_heads": self.num_attention_heads,
            "n_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "d_ff": self.intermediate_size,
            "stem_layers": (),
            "norm_eps": self.rms_norm_eps,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rope_interleaved": False,
            "max_context": self.max_position_embeddings,
            "tied_head": self.tie_word_embeddings,
        }
        return ModelConfig(**(fields | self.extras()))


class Llama(Decoder, kw_only=True):
    """Config of Llama 1 to 3, SmolLM, SmolLM2, TinyLlama, and many other models."""

    attention_bias: bool = False
    mlp_bias: bool = False

    def extras(self) -> dict[str, Any]:
        attention = ("wq", "wk", "wv", "wo") if self.attention_bias else ()
        return {"biases": attention + (("gate", "up", "down") if self.mlp_bias else ())}


class Mistral(Decoder, kw_only=True):
    """Config of Mistral 7B, and of models with the same architecture."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    def extras(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window or 0}


class Windowed(Decoder, kw_only=True):
    """Config of families in which layer_types names the layers with sliding-window attention."""

    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def windows(self, default: list[str]) -> dict[str, Any]:
        """Return ModelConfig's sliding-window fields. default: layer_types, if missing."""
        types = self.layer_types or default
        if len(types) != self.num_hidden_layers or set(types) - {FULL, SLIDING}:
            raise ValueError(
                f"layer_types is {one_line(repr(types))}; expected {FULL} or {SLIDING} for each of "
                f"{self.num_hidden_layers} layers"
            )
        layers = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
        if layers and not self.sliding_window:
            raise ValueError(f"layer_types has {SLIDING}, but no sliding_window is set")
        if not layers:
            return {}
        everywhere = len(layers) == self.num_hidden_layers
        window = {"sliding_window": self.sliding_window}
        return window if everywhere else window | {"window_layers": layers}


class Qwen2(Windowed, kw_only=True):
    """Config of Qwen2 and Qwen2.5."""

    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def __post_init__(self) -> None:
        self.sliding_window = self.sliding_window if self.use_sliding_window else None

    def extras(self) -> dict[str, Any]:
        first = self.max_window_layers if self.sliding_window else self.num_hidden_layers
        layers = range(self.num_hidden_layers)
        windows = self.windows([SLIDING if layer >= first else FULL for layer in layers])
        return {"biases": ("wq", "wk", "wv")} | windows


class Qwen3(Qwen2, kw_only=True):
    """Config of Qwen3 models without experts."""

    head_dim: int | None = 128
    attention_bias: bool = False

    def extras(self) -> dict[str, Any]:
        biases = ("wq", "wk", "wv", "wo") if self.attention_bias else ()
        return super().extras() | {"biases": biases, "qk_norm_eps": self.rms_norm_eps}


def read_config(
    path: Path, kinds: dict[str, type[Decoder]]
) -> tuple[ModelConfig, Decoder, tuple[str, ...], bool]:
    """Read a config.json whose model_type is in `kinds`. Raises CheckpointError.

    Returns the model's config, the keys of config.json (as a Decoder), notes for the user, and True
    if matrices are packed codes.
    """
    whole = read_json(path, "a model's configuration", dict[str, Any])
    kind = whole.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise CheckpointError(
            f"{path}: model_type is {one_line(repr(kind))}; expected one of {', '.join(kinds)}"
        )
    given = kinds[kind].text(whole)
    stored = (whole | given).get(QUANTIZED)
    packed = (
        kinds[kind].packable and isinstance(stored, dict) and stored.get("quant_method") == GEMMA
    )
    if packed:
        whole.pop(QUANTIZED, None)
        given.pop(QUANTIZED, None)
    _refuse_quantized(path, whole | given)
    fields = kinds[kind].__struct_encode_fields__
    notes = check_keys(path, given, kinds[kind].known_as or kind, fields)
    decoder = convert_options(path, given, kinds[kind])
    towers = decoder.outer(whole)
    try:
        config = decoder.model()
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {one_line(error, 400)}") from error
    named = ", ".join(key for key in CODE if given.get(key))
    notes += (f"{path.name} names code ({named}), which is not run",) if named else ()
    return config, decoder, notes + towers, packed


def _refuse_quantized(path: Path, given: dict[str, Any]) -> None:
    """Raise CheckpointError if config.json says that the model is already quantized."""
    for key in QUANTIZERS:
        if (found := given.get(key)) is not None:
            # Only mlx's files have no quant_method.
            method = found.get("quant_method", "mlx") if isinstance(found, dict) else found
            raise CheckpointError(
                f"{path}: {key}: the model is already quantized ({one_line(method)}); "
                "export the original"
            )

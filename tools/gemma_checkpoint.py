"""Checkpoints of random weights in the shapes of Gemma 3n and 4, as Hugging Face folders in bfloat16.

They are for benchmarks: names and sizes are real, the generated text is noise. The command is
tools/make_checkpoint.py. Tensors are written in pieces, so that a checkpoint may be larger than
memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models

from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma_ple import CONTEXT, TABLE, GemmaPle
from stem_edge.export.checkpoints.hugging_face.reader import KINDS

Shapes = dict[str, tuple[int, ...]]
SHARD_NBYTES = 2 << 30
# All values are cut from one block of this many, because drawing billions would take minutes.
NOISE_VALUES = 1 << 22
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "head_dim": 256,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
}
GEMMA_3N: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 262_400,
    "max_position_embeddings": 32_768,
}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads",
    "num_kv_shared_layers",
)  # fmt: skip
# Name -> keys of config.json, SIZES, and the distance between layers of full attention.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "gemma-3n-e2b": (GEMMA_3N, (2048, 8192, 30, 2, 10), 5),
    "gemma-3n-e4b": (GEMMA_3N, (2048, 16_384, 35, 2, 15), 5),
    "gemma-4-e2b": (GEMMA_4 | {"use_double_wide_mlp": True}, (1536, 6144, 35, 1, 20), 5),
    "gemma-4-e4b": (GEMMA_4 | {"use_double_wide_mlp": False}, (2560, 10_240, 42, 2, 18), 6),
}


def describe(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a shape."""
    own, sizes, every = SHAPES[name]
    config = COMMON | own | dict(zip(SIZES, sizes, strict=True)) | changes
    layers = config["num_hidden_layers"]
    kinds = [FULL if number % every == every - 1 else SLIDING for number in range(layers)]
    return config | {"layer_types": kinds}


def write_gemma(out: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write the new folder `out` and return it."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(out / "tokenizer.json", config["vocab_size"])
    noise = _bfloat16(np.random.default_rng(seed).standard_normal(NOISE_VALUES, np.float32))
    shards = list(_shards(_tensors(config)))
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(out / file, shapes, noise, seed + number)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def _tensors(config: dict[str, Any]) -> Shapes:
    """Map Hugging Face's names of all tensors to their shapes."""
    kind = KINDS[config["model_type"]]
    decoder = kind(**{key: value for key, value in config.items() if key in kind.__struct_fields__})
    if not isinstance(decoder, GemmaPle):
        raise TypeError(f"{config['model_type']} is no Gemma")
    model = decoder.model()
    width = model.n_layers * model.ple_width
    shapes: Shapes = {}
    for name, shape in model.backbone_shapes().items():
        if not name.endswith(".ple_context"):
            shapes[decoder.tensor(name)] = shape
    return shapes | {
        decoder.inside + CONTEXT: (width, model.dim),
        decoder.inside + TABLE: (model.records, width),
    }


def _shards(tensors: Shapes) -> Iterator[Shapes]:
    shard: Shapes = {}
    for name, shape in tensors.items():
        if shard and sum(map(_nbytes, [*shard.values(), shape])) > SHARD_NBYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _nbytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def _write_shard(path: Path, shapes: Shapes, noise: npt.NDArray[np.uint16], seed: int) -> None:
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = at + _nbytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            for piece in _values(shape, noise, random):
                file.write(piece.tobytes())


def _values(
    shape: tuple[int, ...], noise: npt.NDArray[np.uint16], random: np.random.Generator
) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield a tensor in pieces: norms and scalars are ones, matrices noise over sqrt(width)."""
    if len(shape) == 1:
        yield _bfloat16(np.ones(shape, np.float32))
        return
    # Subtracted from the exponents, which divides bfloat16 values by a power of two without any
    # arithmetic on floats.
    step = np.uint16(round(math.log2(shape[1]) / 2) << 7)
    left = math.prod(shape)
    while left:
        count = min(left, NOISE_VALUES // 2)
        start = int(random.integers(NOISE_VALUES - count))
        yield _scaled(noise[start : start + count], step)
        left -= count


def _scaled(values: npt.NDArray[np.uint16], step: np.uint16) -> npt.NDArray[np.uint16]:
    small = (values & np.uint16(0x7FFF)) <= step
    return np.where(small, np.uint16(0), values - step).astype(np.uint16)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer with Gemma's tokens for bytes, and almost none for text.

    All ids have a token, because llama.cpp's converter cuts the embedding to those that have.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "th", "t", "h"]
    names += [f"<unused{number}>" for number in range(vocab_size - len(names))]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))

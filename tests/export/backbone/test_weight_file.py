"""Weight files of GGUF files: the values of blocks that are copied, and of those that are quantized again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from formats import format_with
from gguf_files import write_model
from hf_folders import SIZES
from msgspec.structs import replace as changed
from transformers import LlamaConfig, LlamaForCausalLM

from stem_edge.export.backbone.weight_file import PaddedTensors, WeightFile
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.files import create_file
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.stored_types import keep_stored_types
from stem_edge.export.quantization.quantizers import nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Tensor
from stem_edge.graph.weight_plan import Blocks
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32, U8
from stem_edge.numerics.quantizing import dequantize_blocks

WIDE = SIZES | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
LAYERS = {"qkv", "wo", "gate", "up", "down"}
ALL = {*LAYERS, "embedding", "head"}
SYMMETRIC = Recipe(type=format_with(block_size=32))
ASYMMETRIC = Recipe(type=format_with(block_size=32, asymmetric=True))


class Case(NamedTuple):
    """A model in a GGUF file, and the kinds of its matrices whose blocks are copied."""

    types: dict[str, str]
    copied: set[str]
    options: Recipe = Recipe()
    tied: bool = False


CASES = {
    "4 bits with offsets and without": Case(
        {"blk.0.attn_q": "Q4_0", "blk.1.attn_v": "Q4_0", "": "Q4_1"}, ALL - {"embedding"}
    ),
    "8 bits": Case({"": "Q8_0"}, ALL),
    "4 bits beside 8": Case({"blk.0.ffn": "Q8_0", "": "Q4_1"}, ALL - {"embedding"}),
    "an embedding that is the head": Case({"": "Q4_0"}, ALL - {"head"}, tied=True),
    "offsets that are not asked for": Case({"": "Q4_1"}, set(), SYMMETRIC),
    "symmetric blocks": Case({"": "Q4_0"}, LAYERS, SYMMETRIC),
    "zero points for offsets": Case({"": "Q4_1"}, set(), ASYMMETRIC),
    "zero points": Case({"": "Q4_0"}, set(), ASYMMETRIC),
    "blocks of another size": Case({"": "Q4_0"}, set(), Recipe(type=format_with())),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_have_the_values_of_the_file_or_of_the_quantizer(case: str, tmp_path: Path) -> None:
    types, copied, options, tied = CASES[case]
    model = LlamaForCausalLM(LlamaConfig(**WIDE, tie_word_embeddings=tied))
    source = read_checkpoint(write_model(tmp_path / "model.gguf", model, types))
    format = keep_stored_types(source, options).format
    assert isinstance(format, BackboneFormat)
    format = changed(format, kv_peaks=False)  # which a text would give
    plan, quantizer = decoding(source.config, None, format).plan, nearest(format)
    tensors, path = PaddedTensors(source.config, source.backbone), tmp_path / plan.file
    weights = MatrixReader(1, lambda _: None)
    with create_file(path) as file:
        keeps = not format.asymmetric
        WeightFile(file, tensors, weights, quantizer, keeps_blocks=keeps).write(plan)
    data, seen = np.fromfile(path, np.uint8), set[str]()
    for item in plan.items:
        if isinstance(item, Blocks):
            expected = np.concatenate([whole(tensors[part]) for part in item.parts])
            if item.kind not in copied:
                blocks = quantizer(item.name, item.kind, item.bits, item.block)(expected)
                expected = _decoded(item, *blocks[:4])
            found, most = _values(item, data), 1e-6 * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, atol=most, rtol=0, err_msg=item.name)
            seen.add(item.kind)
    assert seen >= LAYERS | copied


def _values(item: Blocks, data: Any) -> F32:
    """Return the matrix that the bytes of a weight file stand for."""

    def read(tensor: Tensor | None, dtype: str, rows: int) -> Any:
        if tensor is None:
            return None
        return data[tensor.offset : tensor.offset + tensor.nbytes].view(dtype).reshape(rows, -1)

    found = list[F32]()
    for piece in item.pieces:
        rows = piece.stop - piece.start
        codes, points = (read(one, "u1", rows) for one in (piece.codes, piece.points))
        scales, offsets = (read(one, "<f4", rows) for one in (piece.scales, piece.offsets))
        found.append(_decoded(item, codes, scales, points, offsets))
    return np.concatenate(found)


def _decoded(item: Blocks, codes: U8, scales: F32, points: U8 | None, offsets: F32 | None) -> F32:
    values = dequantize_blocks(codes, scales, item.bits, points)
    return values if offsets is None else values + offsets.repeat(item.block, axis=1)

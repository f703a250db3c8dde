"""The backbone as an ONNX graph: stem_edge.graph_io names its inputs, stem_edge.reference its maths.

Matrices become MatMulNBits (accuracy level 4: int8 activations) or, in fp32, FusedMatMul; rows come out
of the row cache, a graph input, by GatherBlockQuantized; attention is GroupQueryAttention over a KV
buffer that is input and output at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from stem_edge import graph_io as io
from stem_edge.bundle import WEIGHT_BITS, BackboneFormat, WeightType
from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.heads import HEAD_MATRICES, pad_heads
from stem_edge.export.report import ErrorMeter
from stem_edge.quantize import (
    F32,
    MIN_BLOCK,
    U8,
    dequantize_blocks,
    fitting_block,
    quantize_blocks,
    zero_points,
)
from stem_edge.reference import Matrix, whole
from stem_edge.rows import RecordLayout

PIECE_VALUES = 1 << 24  # values quantized at a time: 64 MiB of float32


class BackboneBuilder:
    """Writes the graph of one model, in the order in which data flows through it."""

    def __init__(
        self,
        graph: Graph,
        config: ModelConfig,
        layout: RecordLayout,
        format: BackboneFormat,
        weights: Mapping[str, Matrix],
        meter: ErrorMeter,
        progress: Callable[[int], object],
    ) -> None:
        self.graph, self.config, self.layout, self.format = graph, config, layout, format
        self.weights, self.meter, self.progress = weights, meter, progress

    def build(self) -> None:
        """Emit the whole graph."""
        self._declare()
        residual, delta = self._embedding(), None
        for layer in range(self.config.n_layers):
            at = f"layers.{layer}."
            x, residual = self._add_norm(at + "attention_norm", residual, delta)
            delta = self._attention(layer, x)
            x, residual = self._add_norm(at + "ffn_norm", residual, delta)
            delta = self._ffn(layer, x)
        x, _ = self._add_norm("norm", residual, delta)
        self._head(x)

    def _declare(self) -> None:
        graph, config = self.graph, self.config
        for name in (io.TOKEN_IDS, io.SLOT_IDS):
            graph.input(name, np.int64, [1, "T"])
        graph.input(io.SEQLENS_K, np.int32, [1])
        graph.input(io.TOTAL_LENGTH, np.int32, [])
        graph.input(io.LOGITS_FROM, np.int64, [1])
        for name in (io.ROPE_COS, io.ROPE_SIN):
            graph.input(name, np.float32, ["context", io.head_width(config) // 2])
        if self.layout.quantized:
            graph.input(io.ROW_ZERO_POINTS, np.uint8, None)
        graph.output(io.LOGITS, np.float32, [1, "N", config.vocab_size])

    def _embedding(self) -> str:
        """Hidden state [1, T, dim] of the token ids."""
        matrix, bits = self.weights["embedding"], WEIGHT_BITS[self.format.head]
        if bits == 32:
            data = self._stream_fp32("embedding", [matrix])
            return self.graph.node("Gather", [data, io.TOKEN_IDS], ["embedded"])
        codes, scales, block = self._quantized("embedding", "embedding", [matrix], bits)
        vocab, width = self.config.vocab_size, self.config.dim * bits // 8
        names = (
            self.graph.stream("embedding.codes", np.uint8, [vocab, width], codes()),
            self.graph.constant("embedding.scales", scales()),
            self.graph.constant(
                "embedding.zero_points", zero_points(vocab, self.config.dim // block, bits)
            ),
        )
        return self._gather_blocks(names, io.TOKEN_IDS, "embedded", bits, block)

    def _attention(self, layer: int, x: str) -> str:
        """Attention of x [1, T, dim], its KV cache updated in place."""
        config, at = self.config, f"layers.{layer}."
        shape: list[int | str] = [1, config.n_kv_heads, "context", io.head_width(config)]
        caches = [name + str(layer) for name in (io.KEYS, io.VALUES)]
        for cache in caches:
            self.graph.input(cache, np.float32, shape)
            self.graph.output(io.NEW + cache, np.float32, shape)
        heads = pad_heads(config, {name: self.weights[at + name] for name in HEAD_MATRICES})
        qkv = self._linear(at + "qkv", "attention", x, [heads[name] for name in ("wq", "wk", "wv")])
        mixed = self.graph.node(
            "GroupQueryAttention",
            [qkv, "", "", *caches, io.SEQLENS_K, io.TOTAL_LENGTH, io.ROPE_COS, io.ROPE_SIN],
            [at + "attended", *(io.NEW + cache for cache in caches)],
            CONTRIB,
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            do_rotary=1,
            rotary_interleaved=int(config.rope_interleaved),
            scale=config.head_dim**-0.5,  # the operator's own would be that of the padded width
        )
        return self._linear(at + "wo", "attention", mixed, [heads["wo"]])

    def _ffn(self, layer: int, x: str) -> str:
        """W_down (SiLU(W_gate x) * u): u is the token's row in a STEM layer, else W_up x."""
        at = f"layers.{layer}."
        gate = self._linear(at + "gate", "ffn", x, [self.weights[at + "gate"]])
        gate = self.graph.node("QuickGelu", [gate], [at + "silu"], CONTRIB, alpha=1.0)
        if layer in self.config.stem_layers:
            up = self._rows(layer)
        else:
            up = self._linear(at + "up", "ffn", x, [self.weights[at + "up"]])
        product = self.graph.node("Mul", [gate, up], [at + "product"])
        return self._linear(at + "down", "ffn", product, [self.weights[at + "down"]])

    def _rows(self, layer: int) -> str:
        """Rows [1, T, d_ff] of the tokens, gathered from the slots of the row cache."""
        layout, name = self.layout, f"layers.{layer}.row"
        # No shapes: shape inference of GatherBlockQuantized refuses a symbolic number of slots.
        codes = self.graph.input(f"{io.ROW_CODES}{layer}", layout.codes_dtype, None)
        if layout.quantized:
            scales = self.graph.input(f"{io.ROW_SCALES}{layer}", np.float32, None)
            names = (codes, scales, io.ROW_ZERO_POINTS)
            return self._gather_blocks(names, io.SLOT_IDS, name, layout.bits, layout.group_size)
        row = self.graph.node("Gather", [codes, io.SLOT_IDS], [name])
        return self.graph.node("Cast", [row], [name + ".fp32"], to=1) if layout.bits == 16 else row

    def _gather_blocks(
        self, tensors: tuple[str, str, str], ids: str, name: str, bits: int, block: int
    ) -> str:
        codes, scales, zero_points = tensors
        return self.graph.node(
            "GatherBlockQuantized",
            # Zero points are explicit because kernels of different providers default differently.
            [codes, ids, scales, zero_points],
            [name],
            CONTRIB,
            bits=bits,
            block_size=block,
            gather_axis=0,
            quantize_axis=1,
        )

    def _add_norm(self, name: str, residual: str, delta: str | None) -> tuple[str, str]:
        """RMS norm of residual + delta, and that sum."""
        weight = self.graph.constant(name, check_finite(name, 0, whole(self.weights[name])))
        eps = self.config.norm_eps
        if delta is None:
            normed = self.graph.node(
                "SimplifiedLayerNormalization",
                [residual, weight],
                [name + ".out"],
                axis=-1,
                epsilon=eps,
            )
            return normed, residual
        total = name + ".sum"
        normed = self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, weight],
            [name + ".out", "", "", total],
            CONTRIB,
            epsilon=eps,
        )
        return normed, total

    def _head(self, x: str) -> None:
        """Logits of the positions from logits_from on: a prompt needs those of its last token."""
        end = self.graph.constant("slice.end", np.array([2**62], np.int64))
        axis = self.graph.constant("slice.axis", np.array([1], np.int64))
        wanted = self.graph.node("Slice", [x, io.LOGITS_FROM, end, axis], ["wanted"])
        source = "embedding" if self.config.tied_head else "head"
        self._linear(io.LOGITS, "head", wanted, [self.weights[source]], self.format.head)

    def _linear(
        self,
        name: str,
        kind: str,
        x: str,
        matrices: Sequence[Matrix],
        type: WeightType | None = None,
    ) -> str:
        """x [1, n, K] times the matrices, stacked to [N, K], transposed."""
        bits = WEIGHT_BITS[type or self.format.weights]
        weight = name + ".weight"
        if bits == 32:
            stacked = self._stream_fp32(weight, matrices)
            return self.graph.node("FusedMatMul", [x, stacked], [name], CONTRIB, transB=1)
        codes, scales, block = self._quantized(weight, kind, matrices, bits)
        rows, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        shape = [rows, width // block, block * bits // 8]
        names = [
            self.graph.stream(weight + ".codes", np.uint8, shape, codes()),
            self.graph.constant(weight + ".scales", scales().reshape(-1)),
        ]
        return self.graph.node(
            "MatMulNBits",
            [x, *names],
            [name],
            CONTRIB,
            K=width,
            N=rows,
            bits=bits,
            block_size=block,
            accuracy_level=4,
        )

    def _quantized(
        self, name: str, kind: str, matrices: Sequence[Matrix], bits: int
    ) -> tuple[Callable[[], Iterator[U8]], Callable[[], F32], int]:
        """A stream of codes, the scales [N, K/block] once it has run out, and the block size."""
        width = matrices[0].shape[1]
        block = fitting_block(width, self.format.block_size)
        if not block:
            raise ExportError(
                f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
                "quantized in blocks; use --backbone fp32 --head fp32"
            )
        scales: list[F32] = []

        def codes() -> Iterator[U8]:
            for values in self._pieces(name, matrices):
                piece, piece_scales = quantize_blocks(values, bits, block)
                self.meter.add(kind, values, dequantize_blocks(piece, piece_scales, bits))
                scales.append(piece_scales)
                yield piece

        return codes, lambda: np.concatenate(scales), block

    def _pieces(self, name: str, matrices: Sequence[Matrix]) -> Iterator[F32]:
        for matrix in matrices:
            step = max(1, PIECE_VALUES // matrix.shape[1])
            for start in range(0, matrix.shape[0], step):
                stop = min(start + step, matrix.shape[0])
                values = check_finite(name, start, matrix.rows(start, stop))
                self.progress(values.nbytes)
                yield values

    def _stream_fp32(self, name: str, matrices: Sequence[Matrix]) -> str:
        shape = [sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]]
        return self.graph.stream(name, np.float32, shape, self._pieces(name, matrices))

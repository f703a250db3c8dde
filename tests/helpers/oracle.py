"""What a model must answer: the numpy reference, to which an answer may be a near tie at most.

The reference itself is compared with frozen logits of torch and transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import models
import msgspec
import numpy as np
from installed import DATA, DEMO
from models import CONFORMANCE, EOS, Kind
from whole_model import forward

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat
from stem_edge.graph.ir import Tensor
from stem_edge.graph.weight_plan import Blocks
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import dequantize_blocks

RowOf = Sequence[int | tuple[int, ...]]  # of each position: the token whose row it has, or a mean


class Reference(Protocol):
    """Computes logits [T, V] of a text whose tokens may look up the rows of others."""

    def logits(
        self, ids: Sequence[int], row_of: RowOf | None = None, layers: Collection[int] | None = None
    ) -> F32:
        """layers: those in which others' rows are looked up; None: all."""


class NumpyReference:
    """The reference on a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        source = read_checkpoint(checkpoint)
        self.config = source.config
        if self.config.row_window:  # whose means begin after the ends that a tokenizer names
            self.config = msgspec.structs.replace(self.config, eos_ids=(EOS,))
        self._backbone: dict[str, Matrix] = dict(source.backbone)
        self._tables: dict[int, Matrix] = dict(source.rows)

    def use(self, bundle: Bundle) -> None:
        """Compute with what a bundle stores: quantized matrices and rows."""
        if bundle.manifest.backbone is not None:  # for onnxruntime
            self._backbone |= dequantized(bundle)
        if self._tables:
            with stem_edge.open_tables(bundle.path) as tables:
                for layer in tables.layers:
                    self._tables[layer] = ArrayMatrix(tables[:, layer])

    def logits(
        self, ids: Sequence[int], row_of: RowOf | None = None, layers: Collection[int] | None = None
    ) -> F32:
        if row_of is None:
            return forward(self.config, self._backbone, self._tables, ids)
        return self._with_rows(list(ids), row_of, layers)

    def _with_rows(self, ids: list[int], row_of: RowOf, layers: Collection[int] | None) -> F32:
        """Give each position with another row a token of its own beyond the vocabulary."""
        size = self.config.vocab_size
        extra = sorted({(t, r) for t, r in zip(ids, row_of, strict=True) if t != r}, key=str)
        given = [
            t if t == r else size + extra.index((t, r)) for t, r in zip(ids, row_of, strict=True)
        ]
        embedding = whole(self._backbone["embedding"])
        head = {} if not self.config.tied_head else {"head": ArrayMatrix(embedding)}
        backbone = self._backbone | {"embedding": _longer(embedding, [t for t, _ in extra])}
        tables = dict[int, Matrix]()
        for layer, table in self._tables.items():
            changes = layers is None or layer in layers
            tables[layer] = _longer(whole(table), [r if changes else t for t, r in extra])
        return forward(self.config, backbone | head, tables, given)[:, :size]


def dequantized(bundle: Bundle) -> dict[str, ArrayMatrix]:
    """Return the matrices of a bundle's backbone by their names, as decoding multiplies them."""
    manifest = bundle.manifest
    assert isinstance(manifest.backbone, BackboneFormat)
    data = (bundle.path / BACKBONE_DATA).read_bytes()
    shapes, found = manifest.model.backbone_shapes(), dict[str, ArrayMatrix]()

    def read(tensor: Tensor, dtype: type[np.generic]) -> Any:
        size = tensor.nbytes // np.dtype(dtype).itemsize
        return np.frombuffer(data, dtype, size, tensor.offset).reshape(tensor.dims)

    for item in decoding(manifest.model, manifest.tables, manifest.backbone).plan.items:
        if not isinstance(item, Blocks):
            continue
        pieces = []
        for piece in item.pieces:
            scales = read(piece.scales, np.float32).reshape(piece.stop - piece.start, -1)
            codes = read(piece.codes, np.uint8).reshape(len(scales), -1)
            points = None
            if piece.points is not None:
                points = read(piece.points, np.uint8).reshape(len(scales), -1)
            pieces.append(dequantize_blocks(codes, scales, item.bits, points))
        rows = np.concatenate(pieces)
        for part in item.parts:
            count = shapes[part][0]
            found[part], rows = ArrayMatrix(rows[:count]), rows[count:]
    return found


def _longer(table: F32, more: Sequence[int | tuple[int, ...]]) -> Matrix:
    """A table with more rows: copies, or means."""
    rows = [table[list(one)].mean(0) if isinstance(one, tuple) else table[one] for one in more]
    return ArrayMatrix(np.concatenate([table, np.stack(rows)]) if rows else table)


class OnePass:
    """The demo's own logits; tests/tools/test_demo_logits.py compares these with frozen ones.

    device_memory: for those of a device, whose kernels round otherwise.
    """

    def __init__(self, device_memory: str | None) -> None:
        self._options: Any = {"threads": 1, "device_memory": device_memory}

    def logits(
        self, ids: Sequence[int], row_of: RowOf | None = None, layers: Collection[int] | None = None
    ) -> F32:
        given: Any = None if row_of is None else list(row_of)
        with stem_edge.load(DEMO, **self._options) as model:
            return model.logits(ids, stem_ids=given)


@dataclass
class Answer:
    """Token ids of an answer, with the log probability of each."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None

    def add(self, chunk: Any) -> None:
        """Take the next chunk."""
        assert chunk.error is None, chunk.error
        self.ids += chunk.token_ids
        self.logprobs += [one.logprob for one in chunk.logprobs or ()]
        self.text += chunk.text
        self.reason = chunk.finish_reason


@dataclass(frozen=True)
class Oracle:
    """A reference, and how near answers are to it."""

    reference: Reference
    kind: Kind

    def near(self, found: F32, ids: Sequence[int], row_of: RowOf | None = None) -> None:
        """Check the logits [T, V] of a text."""
        self.compare(found, self.reference.logits(ids, row_of))

    def compare(self, found: F32, expected: F32) -> None:
        """Check logits; those of models that round by their distributions."""
        if self.kind.nats:
            assert divergence(expected, found).mean() < self.kind.nats
        else:
            assert np.abs(found - expected).max() < self.kind.tolerance

    def check(
        self, prompt: Sequence[int], answer: Answer, row_of: RowOf | None = None, slack: float = 1.0
    ) -> None:
        """Check that each token is the best one or a near tie, and its log probability.

        row_of: of the prompt, and of the answer if it is as long. slack: times the tolerances.
        """
        ids = [*prompt, *answer.ids]
        if row_of is not None and len(row_of) < len(ids):
            row_of = [*row_of, *answer.ids]
        logits = self.reference.logits(ids, row_of)[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(answer.ids)), answer.ids]
        behind = logits.max(axis=1) - chosen
        assert behind.max() < self.kind.tie * slack, (behind.argmax(), behind.max())
        if answer.logprobs:
            peak = logits.max(axis=1)
            total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            off = np.abs(chosen - total - answer.logprobs).max()
            assert len(answer.logprobs) == len(answer.ids) and off < 2 * self.kind.tolerance * slack


def reference_of(name: str, shared: Path, engine: str = models.ORT) -> Reference:
    """The reference of a model."""
    if name == "demo":
        return OnePass("4GB" if engine == models.DEVICE else None)
    return NumpyReference(models.checkpoint_of(name, shared))


def frozen(name: str) -> tuple[list[int], F32]:
    """Return a text and the logits [n, V] of its last positions by torch or transformers."""
    if name == "phone":
        with np.load(CONFORMANCE / "gemma4-mobile" / "reference.npz") as data:
            return data["token_ids"][0].tolist(), data["logits"][0]
    with np.load(DATA / "blackbox.npz") as data:
        return models.prompts(name)[0], data[name]

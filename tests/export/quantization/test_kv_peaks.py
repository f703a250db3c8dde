"""Greatest keys and values of a text, which scale quantized KV caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.quantization.calibration import observe, read_token_ids, sequences
from stem_edge.export.quantization.kv_peaks import TEXT_TOKENS
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.graph.formats import BACKBONE_DATA
from stem_edge.graph.names import head_width
from stem_edge.graph.weight_plan import SMALL_ALIGNMENT
from stem_edge.numerics.arithmetic import rms_norm
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import embed


def test_peaks_are_those_of_all_tokens_that_the_exporter_saw(tiny_checkpoint: Path) -> None:
    """Of keys, the length of a pair before its rotation, which does not depend on the position."""
    source = read_checkpoint(tiny_checkpoint)
    config = source.config
    texts = [list(range(40)), list(range(100, 130))]
    expected: dict[str, list[F32]] = {"keys": [], "values": []}
    for text in texts:
        x = rms_norm(
            embed(config, source.backbone, text),
            source.backbone["layers.0.attention_norm"],
            config.norm_eps,
        )
        k, v = (x @ whole(source.backbone[f"layers.0.{name}"]).T for name in ("wk", "wv"))
        pairs = np.repeat(np.hypot(k[:, 0::2], k[:, 1::2]), 2, axis=1)
        expected["keys"].append(pairs)
        expected["values"].append(np.abs(v))
    found, width = observe(source, texts[0], texts[1:])[1], head_width(config.layer(0))
    for what, parts in expected.items():
        greatest = np.concatenate(parts).max(axis=0).reshape(config.n_kv_heads, config.head_dim)
        padded = np.full((config.n_kv_heads, width), greatest.max())
        padded[:, : config.head_dim] = greatest
        assert np.allclose(found[f"layers.0.{what}.peaks"], padded.ravel(), rtol=1e-5)


def test_peaks_are_in_the_bundle(tiny_checkpoint: Path, tiny_bundle: Path) -> None:
    source, bundle = read_checkpoint(tiny_checkpoint), stem_edge.open_bundle(tiny_bundle)
    config, data = source.config, bundle.file(BACKBONE_DATA).read_bytes()
    judged = list(bundle.manifest.report.probe_tokens)
    text = read_token_ids(None, convert_tokenizer("bytes", None, add_bos=True), config.vocab_size)
    texts = sequences(text, TEXT_TOKENS, config.max_context)
    peaks, offset = observe(source, judged, texts, threads=2)[1], 0
    for name in (name for name in peaks if name.endswith(".peaks")):
        values = peaks[name]
        assert data[offset : offset + values.nbytes] == values.tobytes(), name
        offset += -(-values.nbytes // SMALL_ALIGNMENT) * SMALL_ALIGNMENT

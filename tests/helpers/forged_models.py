"""Bundles of arbitrary models, with weights and tables of exactly the sizes that follow.

Changing a single number of a manifest is mostly refused, because the size of the weights no longer
matches. Here everything matches, so that graphs of odd descriptions reach the engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np
from hypothesis import strategies as st
from manifests import REPORT, file_entry
from stores import write_store

from stem_edge.bundle.manifest import FORMAT_VERSION, MANIFEST, TABLES, TOKENIZER, TOKENIZER_CONFIG
from stem_edge.config import ModelConfig
from stem_edge.ggml.gguf_schema import ALIGNMENT, foreign_parts
from stem_edge.ggml.gguf_tensors import encode_tensors, planned_tensors
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import (
    BACKBONE_DATA,
    BACKBONE_GRAPH,
    GGUF,
    GGUF_TYPES,
    PREFILL_DATA,
    BackboneFormat,
    EngineName,
    GgufFormat,
    MatrixKind,
    WeightType,
)
from stem_edge.graph.prompt_products import prompts
from stem_edge.layers import BIASED, FFN_TERMS, LinearRope, Llama3Rope, RopeScaling, YarnRope
from stem_edge.limits import (
    LEAST_SCALING,
    MAX_CONTEXT,
    MAX_KERNEL,
    MAX_MIXED,
    MAX_ROW_WINDOW,
    MAX_SOFTCAP,
)
from stem_edge.special import dense_twin
from stem_edge.tables.codecs import CODECS
from stem_edge.tables.rows import RecordLayout, ScaleType

VOCABULARY = 8  # the smallest, because ids of the prompt are below it
ONE_TOKEN = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
INT4 = BackboneFormat(weights="int4", head="int4", block_size=16, prefill=True)
Q8_0 = GgufFormat(weights="q8_0")
WIDTHS = [16, 32, 32, 48, 64, 64, 96, 96, 256, 256, 256, 512, 1, 8, 17, 24]
EVEN = [2, 4, 6, 8, 10, 16, 18, 32, 64, 126, 128, 256, 512]
Forgery = Callable[[Path], int]  # writes a bundle to a folder, returns the slots to load it with


def chosen(*values: Any) -> st.SearchStrategy[Any]:
    """Draw one of some values, most often the first."""
    return st.sampled_from([values[0]] * len(values) + [*values])


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Draw descriptions that ModelConfig accepts."""
    layers, kv_heads = draw(chosen(2, 1, 3)), draw(chosen(1, 2, 3, 16))
    vocab_size = draw(chosen(32, VOCABULARY, 9, 300))
    d_ff, dim = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    ffn = draw(st.sampled_from([kind for kind in FFN_TERMS if kind not in ("dense", "ple")]))
    hashed, engram = ffn == "hash-moe", ffn == "engram"
    grams = engram or ffn == "ngrams"
    order = draw(chosen(2, 3, 16)) if grams else 0
    tied, biases = draw(st.booleans()), draw(st.sets(st.sampled_from(BIASED), max_size=3))
    some_layers = st.sets(st.integers(0, layers - 1)).map(lambda found: tuple(sorted(found)))
    rows = draw(some_layers.filter(bool) if engram else some_layers) if ffn != "ngrams" else (0,)
    tables = (order - 1) * len(rows) if grams else 0
    factors = st.tuples(*[chosen(5, 1, (MAX_MIXED - 1) // vocab_size)] * order)
    return ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=layers,
        n_heads=kv_heads * draw(chosen(1, 2, 7, 64)),
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(EVEN)),
        d_ff=d_ff,
        stem_layers=rows,
        norm_eps=draw(chosen(1e-5, 5e-324, 0.999, 1e-38)),
        rope_theta=draw(chosen(1e4, 1 + 2e-16, 1e15)),
        max_context=draw(chosen(64, 16, MAX_CONTEXT)),
        stem_ffn=ffn,
        row_window=draw(chosen(0, 2, 16, MAX_ROW_WINDOW)) if rows and not (hashed or grams) else 0,
        row_experts=draw(chosen(0, 2, 3, 7)) if rows and not (hashed or grams) else 0,
        row_rank=0 if hashed else draw(chosen(*([] if grams else [0]), 1, min(16, d_ff), d_ff)),
        ngram_order=order,
        ngram_sizes=draw(st.tuples(*[chosen(8, 1, 97)] * tables)),
        ngram_end=draw(st.none() | st.integers(0, vocab_size - 1)) if grams else None,
        ngram_multipliers=draw(st.tuples(*[factors] * len(rows))) if engram else (),
        ngram_filler=draw(st.integers(0, vocab_size - 1)) if engram else 0,
        engram_kernel=draw(chosen(4, 0, 1, MAX_KERNEL)) if engram else 0,
        n_experts=draw(chosen(VOCABULARY, 1, vocab_size)) if hashed else 0,
        tied_head=tied,
        rope_interleaved=draw(st.booleans()),
        rope_scaling=draw(SCALINGS),
        sliding_window=draw(chosen(0, 1, 4, MAX_CONTEXT)),
        window_layers=draw(st.none() | some_layers),
        qk_norm_eps=draw(chosen(None, 0.0, 1e-6, 0.999)),
        post_norms=draw(st.booleans()),
        biases=tuple(biases - ({"head"} if tied else set())),
        logit_softcap=draw(chosen(0.0, 30.0, LEAST_SCALING, MAX_SOFTCAP)),
    )


FACTOR, CONTEXT = chosen(8.0, 1.0, 65536.0), chosen(64, 1, MAX_CONTEXT)
EDGE = chosen(1.0, 1e-6, 1.0000000000000002, float(MAX_CONTEXT))
SCALINGS: st.SearchStrategy[RopeScaling | None] = st.one_of(
    st.none(),
    st.builds(LinearRope, FACTOR),
    st.builds(Llama3Rope, FACTOR, chosen(1.0, 1e-6), chosen(4.0, 1.0000000000000002), CONTEXT),
    st.builds(YarnRope, FACTOR, CONTEXT, EDGE, EDGE, EDGE, st.booleans()),
)


@st.composite
def layouts(draw: st.DrawFn, config: ModelConfig) -> RecordLayout | None:
    """Draw a layout of a model's records; None if the drawn type does not fit them."""
    row_type = draw(st.sampled_from(list(CODECS)))
    quantized = CODECS[row_type].scaled
    try:
        return RecordLayout(
            records=config.records,
            layers=config.row_layers,
            parts=config.row_parts(),
            row_type=row_type,
            group_size=draw(st.sampled_from([16, 32, 64, 128, 256])) if quantized else 0,
            scale_type=draw(st.sampled_from(get_args(ScaleType))) if quantized else "fp32",
        )
    except ValueError:
        return None


TYPES = st.sampled_from(get_args(WeightType))
PRODUCTS = ["layers.0.qkv", "layers.0.wo", "layers.1.down", "layers.0.gate", "x"]
BACKBONES = st.builds(
    BackboneFormat,
    weights=TYPES,
    head=TYPES,
    block_size=chosen(32, 16, 17, 256),
    kinds=st.dictionaries(st.sampled_from(get_args(MatrixKind)), TYPES, max_size=2),
    asymmetric=st.booleans(),
    prefill=st.booleans(),
    balanced=st.lists(st.sampled_from(PRODUCTS), max_size=3).map(tuple),
)


@st.composite
def made_up(draw: st.DrawFn, engine: EngineName) -> Forgery:
    """Draw a bundle of such a model."""
    config = draw(models())
    if engine == "onnxruntime" and not config.ngram_order:  # because no other runs these
        several = {"streams": draw(chosen(1, 2, 8)), "laurel_rank": draw(chosen(0, 16, 1))}
        config = msgspec.structs.replace(config, **several)
    layout = draw(layouts(config)) if config.stem_layers else None
    if config.stem_layers and layout is None:
        config = dense_twin(config)
    backbone = draw(BACKBONES)
    gguf = GgufFormat(weights=draw(st.sampled_from(GGUF_TYPES)))
    number = draw(st.integers(0, 255))

    def write(out: Path) -> int:
        write_model(out, engine, config, layout, backbone, gguf, number)
        return layout.records if layout is not None else 16

    return write


def write_model(
    out: Path,
    engine: EngineName,
    config: ModelConfig,
    layout: RecordLayout | None = None,
    backbone: BackboneFormat = INT4,
    gguf: GgufFormat = Q8_0,
    number: int = 0,
) -> None:
    """Write a bundle of a model. `number` selects the weights."""
    out.mkdir(parents=True)
    described: dict[str, Any] = {"model": config, "tables": layout, "indexed": False}
    try:
        if engine == "ggml":
            files, described["gguf"] = {GGUF: _gguf(config, gguf, number)}, gguf
        else:
            described["backbone"] = backbone
            files = {BACKBONE_GRAPH: b""} | _onnx(config, layout, backbone, number)
    except ValueError:  # the format cannot store the model, which opening must refuse as well
        files = dict.fromkeys((BACKBONE_DATA, PREFILL_DATA, BACKBONE_GRAPH), b"")
    if layout is not None:
        described["indexed"] = bool(config.n_experts)  # because tokens share an expert's record
        noise = np.frombuffer(_noise(layout.records * layout.record_nbytes, number), np.uint8)
        records = noise.reshape(layout.records, layout.record_nbytes)
        index = [0] * config.vocab_size if config.n_experts else None
        write_store(out / TABLES, layout, records, layout.records, index)
    files |= {TOKENIZER: json.dumps(ONE_TOKEN).encode(), TOKENIZER_CONFIG: b"{}"}
    for name, data in files.items():
        (out / name).write_bytes(data)
    described |= {"format_version": FORMAT_VERSION, "report": REPORT}
    described["files"] = {
        path.relative_to(out).as_posix(): file_entry(path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    (out / MANIFEST).write_bytes(msgspec.json.encode(described))


def _onnx(
    config: ModelConfig, layout: RecordLayout | None, backbone: BackboneFormat, number: int
) -> dict[str, bytes]:
    plans = [decoding(config, layout, backbone).plan]
    plans += [prompts(config, layout, backbone).plan] if backbone.prefill else []
    return {plan.file: _noise(plan.nbytes, number) for plan in plans}


def _gguf(config: ModelConfig, gguf: GgufFormat, number: int) -> bytes:
    """Make a header that holds only the list of tensors, and their values."""
    if foreign_parts(config):  # no file can hold it
        return b""
    tensors = planned_tensors(config, gguf.weights)
    header = b"\0" * ALIGNMENT + encode_tensors(tensors)
    header += bytes(-len(header) % ALIGNMENT)
    return header + _noise(tensors[-1].end, number)


def _noise(nbytes: int, number: int) -> bytes:
    """Make zeros, random bytes, or small float32 values."""
    if number % 4 < 2:
        return bytes(nbytes)
    if number % 4 == 2:
        return Random(number).randbytes(nbytes)
    values = np.random.default_rng(number).normal(0, 0.1, nbytes // 4 + 1).astype("<f4")
    return values.tobytes()[:nbytes]

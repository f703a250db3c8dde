"""Forged bundles: every file changed in many ways with a correct checksum, and arbitrary models.

Each is refused with an error of ours, or runs with wrong numbers. Nothing else: no other exception,
no crash, no hang, and no memory beyond the plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forged_cases import Case, Forged
from forged_models import made_up, write_model
from forging import TEMPLATES, changed_bytes, changed_json, sealed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from installed import needs_ggml
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge import limits
from stem_edge.bundle.manifest import MANIFEST, TABLES, TOKENIZER, TOKENIZER_CONFIG
from stem_edge.config import ModelConfig
from stem_edge.export.tables import with_checksums
from stem_edge.graph.formats import BACKBONE_DATA, GGUF, PREFILL_DATA, BackboneFormat, EngineName
from stem_edge.tables.shards import index_blocks, open_table_store
from stem_edge.tables.store import CRC_NBYTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory so"),
]
SHAPE = Shape(vocab_size=258, n_layers=2, d_ff=32, stem_layers=(1,), max_seqlen=64)
engines: pytest.MarkDecorator = pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)]
)
Cases = Callable[[Callable[..., None]], Callable[..., None]]


def cases(count: int) -> Cases:
    """Run so many cases, the same every time, without shrinking, which would take minutes."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[EngineName, Path]:
    """A bundle with all kinds of files, and one for ggml. Do not change them."""
    folder = tmp_path_factory.mktemp("genuine")
    checkpoint = write_checkpoint(folder / "checkpoint", SHAPE, layout="consolidated")
    made: dict[EngineName, Path] = {"onnxruntime": folder / "onnx", "ggml": folder / "gguf"}
    stem_edge.export_bundle(
        checkpoint, made["onnxruntime"], type="int4", rows="int8", progress=False
    )
    stem_edge.export_bundle(
        checkpoint, made["ggml"], engine="ggml", type="q4_0", rows="int8", progress=False
    )
    return made


@pytest.fixture
def forged(tmp_path: Path) -> Iterator[Forged]:
    with Forged(tmp_path) as cases:
        yield cases


@engines
def test_a_genuine_bundle_runs(
    engine: EngineName, bundles: dict[EngineName, Path], forged: Forged
) -> None:
    """Otherwise all others might be refused for another reason."""
    assert not forged.check(Case(str(bundles[engine]), engine))
    resealed = sealed(bundles[engine], forged.bundle(), {TOKENIZER_CONFIG: b"{}"})
    assert not forged.check(Case(str(resealed), engine))


SHARD = f"{TABLES}/records/c/0/0"
Changes = Callable[[bytes], st.SearchStrategy[bytes]]


def of_numbers(data: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(changed_bytes(data), changed_bytes(data, resized=False))


def of_text(data: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(*[changed_json(data)] * 3, changed_bytes(data))


# Engine, file, number of cases, what changes it, how it is loaded.
FILES: list[tuple[EngineName, str, int, Changes, dict[str, Any]]] = [
    ("onnxruntime", BACKBONE_DATA, 12, of_numbers, {}),
    ("onnxruntime", PREFILL_DATA, 8, of_numbers, {}),
    ("onnxruntime", SHARD, 6, of_numbers, {}),
    ("ggml", GGUF, 10, of_numbers, {}),
    ("onnxruntime", MANIFEST, 20, of_text, {}),
    ("ggml", MANIFEST, 20, of_text, {}),
    ("onnxruntime", f"{TABLES}/zarr.json", 8, of_text, {}),
    ("onnxruntime", f"{TABLES}/records/zarr.json", 8, of_text, {}),
    ("onnxruntime", TOKENIZER, 6, changed_json, {"texts": True}),
    ("onnxruntime", TOKENIZER, 6, changed_bytes, {"texts": True}),
]


@pytest.mark.parametrize(
    ("engine", "name", "count", "changes", "options"),
    [pytest.param(*case, marks=needs_ggml if case[0] == "ggml" else ()) for case in FILES],
)
def test_a_changed_file(
    engine: EngineName,
    name: str,
    count: int,
    changes: Changes,
    options: dict[str, Any],
    bundles: dict[EngineName, Path],
    forged: Forged,
) -> None:
    bundle = bundles[engine]

    @cases(count)
    @given(changes((bundle / name).read_bytes()))
    def load(changed: bytes) -> None:
        out = sealed(bundle, forged.bundle(), {name: changed})
        forged.check(Case(str(out), engine, **options))

    load()
    assert forged.found["ran"] or changes is not of_numbers
    assert forged.found["BundleError"] or name != MANIFEST


def test_rows(bundles: dict[EngineName, Path], forged: Forged) -> None:
    """The rows' own checksums are corrected, too."""
    bundle = bundles["onnxruntime"]
    (grid,) = open_table_store(bundle / TABLES).grids
    nbytes = grid.shard_records(0) * grid.stride
    sealed_rows = np.frombuffer((bundle / SHARD).read_bytes(), np.uint8, nbytes)
    records = sealed_rows.reshape(-1, grid.stride)[:, :-CRC_NBYTES]

    @cases(8)
    @given(changed_bytes(records.tobytes(), resized=False))
    def load(changed: bytes) -> None:
        rows = np.frombuffer(changed, np.uint8).reshape(records.shape)
        shard = b"".join([with_checksums(rows), *index_blocks(*grid.index_facts(0))])
        out = sealed(bundle, forged.bundle(), {SHARD: shard})
        forged.check(Case(str(out), "onnxruntime"))

    load()
    assert forged.found["ran"]


GREATEST: dict[str, Any] = {
    "vocab_size": limits.MAX_VOCAB,
    "n_layers": limits.MAX_LAYERS,
    "dim": limits.MAX_WIDTH,
    "d_ff": limits.MAX_WIDTH,
    "n_heads": limits.MAX_HEADS,
    "n_kv_heads": limits.MAX_HEADS,
    "max_context": limits.MAX_CONTEXT,
}
LONG = 60_000  # as many as fit into a manifest


@engines
def test_the_greatest_numbers(
    engine: EngineName, bundles: dict[EngineName, Path], forged: Forged
) -> None:
    """Numbers alone and together, each with the fields that make it worst."""
    told = json.loads((bundles[engine] / MANIFEST).read_bytes())
    together = GREATEST | {"head_dim": 16}
    dense: dict[str, Any] = {"stem_layers": []}
    changes: list[dict[str, Any]] = [{name: number} for name, number in GREATEST.items()]
    changes += [together, together | dense, {"vocab_size": 1 << 24, "dim": (1 << 15) - 64} | dense]
    changes += [{"n_layers": limits.MAX_LAYERS, "d_ff": 1 << 20, "dim": 1024} | dense]
    for change in changes:
        tables = None if "stem_layers" in change else told["tables"]
        forgery = told | {"model": told["model"] | change, "tables": tables}
        written = json.dumps(forgery).encode()
        out = sealed(bundles[engine], forged.bundle(), {MANIFEST: written})
        refused = forged.check(Case(str(out), engine))
        assert refused or change.keys() == {"max_context"}


def test_the_longest_lists(bundles: dict[EngineName, Path], forged: Forged) -> None:
    told = json.loads((bundles["onnxruntime"] / MANIFEST).read_bytes())
    report = told["report"]
    changes: list[dict[str, Any]] = [
        {"backbone": told["backbone"] | {"balanced": [f"{n:x}" for n in range(LONG)]}},
        {"model": told["model"] | {"eos_ids": [9] * LONG}},
        {"report": report | {"probe_tokens": [9] * LONG}},
        {"report": report | {"notes": [""] * LONG}},
    ]
    for change in changes:
        written = json.dumps(told | change).encode()
        out = sealed(bundles["onnxruntime"], forged.bundle(), {MANIFEST: written})
        assert not forged.check(Case(str(out), "onnxruntime"))


@engines
def test_the_deepest_model(engine: EngineName, forged: Forged) -> None:
    """The model has as many layers as allowed, each of them small."""
    deep = ModelConfig(
        vocab_size=32,
        dim=16,
        n_layers=limits.MAX_LAYERS,
        n_heads=1,
        n_kv_heads=1,
        head_dim=16,
        d_ff=16,
        stem_layers=(),
        norm_eps=1e-5,
        rope_theta=1e4,
        max_context=64,
    )
    # Long lists, because each of many products is looked up in them.
    names = tuple(f"{number:x}" for number in range(LONG))
    backbone = BackboneFormat(
        weights="int4", head="int4", block_size=16, prefill=True, balanced=names
    )
    out = forged.bundle()
    write_model(out, engine, deep, backbone=backbone)
    assert not forged.check(Case(str(out), engine))


def test_tokenizer_config(bundles: dict[EngineName, Path], forged: Forged) -> None:
    bundle = bundles["onnxruntime"]
    told = json.loads((bundle / TOKENIZER_CONFIG).read_bytes())
    written = [json.dumps(told | {"chat_template": text}).encode() for text in TEMPLATES]

    @cases(12)
    @given(st.sampled_from(written).flatmap(lambda d: st.one_of(st.just(d), changed_json(d))))
    def load(changed: bytes) -> None:
        out = sealed(bundle, forged.bundle(), {TOKENIZER_CONFIG: changed})
        forged.check(Case(str(out), "onnxruntime", texts=True))

    load()


@engines
def test_arbitrary_models(engine: EngineName, forged: Forged) -> None:
    """Models of any description, with weights and tables of matching sizes."""

    @cases(15)
    @given(made_up(engine))
    def load(model: Callable[[Path], int]) -> None:
        out = forged.bundle()
        slots = model(out)
        forged.check(Case(str(out), engine, slots=slots))

    load()
    assert forged.found["ran"]

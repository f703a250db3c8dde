"""Edited random models give the logits of a model that looks up other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import HASHED, SIZES, VARIANTS, write
from edit_oracle import PROMPT, Oracle, Rows, Tried, swap, tokens, tried
from exact_models import TOLERANCE, exact_stem, off
from installed import DEMO, HAS_GGML, bundle_for, export_ggml
from loading import load_fixed
from prompt_graph import load_with
from tiers import slow_but
from torch import Tensor

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.config import ModelConfig
from stem_edge.edit_files.file import SCOPES, Scope
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.block_search import least_error_scales
from stem_edge.runtime import Model
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout

# Scheme, source, target, options, and what each letter of the source looks up.
CASES: list[tuple[str, str, str, dict[str, Any], list[str]]] = [
    ("swap", "cat", "dog", {}, ["d", "o", "g"]),
    ("pad-left", "horse", "dog", {"pad": "#"}, ["#", "#", "d", "o", "g"]),
    ("pad-right", "horse", "dog", {"pad": 35}, ["d", "o", "g", "#", "#"]),
    ("copy", "dolphin", "dog", {}, ["d", "d", "o", "o", "g", "g", "g"]),
    ("copy", "horse", "fly", {}, ["f", "l", "y", "y", "y"]),
    ("subset", "cat", "horse", {"subset": [0, 2, 4]}, ["h", "r", "e"]),
    ("subset", "cat", "horse", {}, ["r", "s", "e"]), ("average", "cat", "horse", {}, ["horse"] * 3),
    ("average", "dolphin", "zoo", {}, ["zoo"] * 7), ("auto", "cat", "ape", {}, ["a", "p", "e"]),
    ("auto", "cat", "mouse", {}, ["u", "s", "e"]),
    ("auto", "horse", "ox", {}, ["o", "o", "x", "x", "x"]),
]  # fmt: skip


NAMES = ["stem", "low rank, plus", "stem-gate", "hash-moe", "all at once"]
NAMES += ["means of rows", "mixture of rows"]

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=slow_but(["hash-moe", "all at once"], NAMES))
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return tried(tmp_path_factory.mktemp("any"), request.param)


def fewest(tried: Tried) -> int:
    """Fewest slots of a model: for a step of 4 tokens, and for those before it whose rows are in their means."""
    return 4 + max(0, open_bundle(tried.path).manifest.model.row_window - 1)


def check_cases(model: Model, oracle: Oracle, cases: Sequence[tuple[Any, ...]]) -> None:
    """Check each case with both scopes, in all layers and in some, and that nothing remains."""
    ids = model.tokenize(PROMPT)
    before = model.logits(ids)
    assert off(before, oracle.logits(ids, oracle.own(ids))) < TOLERANCE
    for (scheme, source, target, options, letters), scope, layers in cases:
        edit = stem_edge.make_edit(
            model.bundle, source, target, scheme=scheme, scope=scope, layers=layers, **options
        )
        with model.edited(edit):
            found = model.logits(ids)
        rows = oracle.edited([(source, letters, scope, layers)], ids, len(ids))
        assert off(found, oracle.logits(ids, rows)) < TOLERANCE, (scheme, source, scope, layers)
        assert off(found, before) > 1e-3
    assert np.array_equal(model.logits(ids), before)


def test_every_scheme_in_every_architecture(any_model: Tried, engine: EngineName) -> None:
    experts = any_model.oracle.config.n_experts
    cases = [case for case in CASES if not experts or all(len(one) == 1 for one in case[4])]
    every = [(case, scope, None) for case in cases for scope in ("positions", "everywhere")]
    some = [(case, scope, [2]) for case, scope, _ in every[1::3]]
    with load_fixed(bundle_for(any_model.path, engine), engine=engine) as model:
        check_cases(model, any_model.oracle, every + some)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"slots": 4}, {"slots": 4, "overlap": False}, {"slots": 5},
        {"slots": 7, "warm_start": False}, {"resident": True},
        {"resident": True, "overlap": False}, {"context_length": 48},
    ],
    ids=str,
)  # fmt: skip
def test_however_rows_come(options: dict[str, Any], stem: Tried, engine: EngineName) -> None:
    cases = [(case, scope, None) for case in CASES[::3] for scope in ("positions", "everywhere")]
    with load_fixed(bundle_for(stem.path, engine), engine=engine, **options) as model:
        check_cases(model, stem.oracle, cases)


def test_generation_looks_up_what_the_edits_say(any_model: Tried, engine: EngineName) -> None:
    oracle = any_model.oracle
    # Letters that random models like to write: an edit everywhere must meet generated tokens.
    with load_fixed(
        bundle_for(any_model.path, engine), engine=engine, slots=fewest(any_model)
    ) as model:
        ids = model.tokenize(PROMPT)
        plain = list(tokens(model.generate(ids, max_new_tokens=8)))
        assert plain == oracle.greedy(ids, [], 8)
        letters = sorted({chr(one) for one in plain if 32 < one < 127} - set("dog"))[:3]
        source = "".join(letters) or "cat"
        target = "dogs"[: len(source)]
        edits = [
            stem_edge.make_edit(model.bundle, source, target, scope="everywhere", scheme="swap"),
            stem_edge.make_edit(model.bundle, "cat", "dog"),
        ]
        specs = [
            (source, list(target), "everywhere", None),
            ("cat", ["d", "o", "g"], "positions", None),
        ]
        for count in (1, 2):
            with model.edited(*edits[:count]):
                found = list(tokens(model.generate(ids, max_new_tokens=8)))
            assert found == oracle.greedy(ids, specs[:count], 8)
        assert list(tokens(model.generate(ids, max_new_tokens=8))) == plain


def test_rows_of_other_values(any_model: Tried, engine: EngineName) -> None:
    oracle = any_model.oracle
    rng, layers = np.random.default_rng(4), oracle.config.stem_layers
    width = next(iter(oracle.rows.values())).shape[1]
    scale = float(next(iter(oracle.rows.values())).std())
    values = {
        token: (scale * rng.normal(size=(len(layers), width))).astype(np.float32)
        for token in (ord("c"), 256)
    }
    with load_fixed(
        bundle_for(any_model.path, engine), engine=engine, slots=fewest(any_model)
    ) as model:
        ids = model.tokenize(PROMPT)
        rows = oracle.own(ids)
        for at, token in enumerate(ids):
            for place, layer in enumerate(layers):
                if token in values:
                    rows[layer][at] = torch.from_numpy(values[token][place])
        given: dict[Any, Any] = {"c": values[ord("c")], 256: values[256]}
        edit = stem_edge.make_row_edit(model.bundle, given)
        before = model.logits(ids)
        with model.edited(edit):
            assert off(model.logits(ids), oracle.logits(ids, rows)) < TOLERANCE
        assert np.array_equal(model.logits(ids), before)
        last = stem_edge.make_row_edit(
            model.bundle, {"c": values[ord("c")][-1:]}, layers=layers[-1:]
        )
        rows = oracle.own(ids)
        for at in np.flatnonzero(np.array(ids) == ord("c")).tolist():
            rows[layers[-1]][at] = torch.from_numpy(values[ord("c")][-1])
        with model.edited(last):
            assert off(model.logits(ids), oracle.logits(ids, rows)) < TOLERANCE


@dataclass(frozen=True)
class Rounded(Oracle):
    """An oracle whose means are rounded like the rows of a layout."""

    layout: RecordLayout

    def mean(self, layer: int, text: str) -> Tensor:
        if len(text) == 1:
            return self.rows[layer][ord(text)]
        total = sum((self.rows[layer][byte] for byte in text.encode()), torch.zeros(80))
        exact = (total / len(text)).numpy().astype(np.float32)[None]
        packed = pack_records(self.layout, [exact] * len(self.layout.layers), least_error_scales)
        return torch.from_numpy(self.layout.unpack(packed, 0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["fp16", "int8", "int4", "mixed"])
def test_with_other_types_of_rows(tables: Any, stem: Tried, tmp_path: Path) -> None:
    """The oracle takes its rows from open_tables, and rounds means like rows."""
    options: dict[str, Any] = {}
    if tables == "mixed":
        (tmp_path / "text.txt").write_text(PROMPT * 9)
        options = {"calibration": tmp_path / "text.txt"}
    checkpoint = stem.path.parent / "checkpoint"
    out = stem_edge.export_bundle(
        checkpoint, tmp_path / "out", type="fp32", rows=tables, **options
    ).path
    export_ggml(checkpoint, out, rows=tables, **options)
    with stem_edge.open_tables(out) as opened:
        rows = {layer: torch.from_numpy(opened[:, layer]) for layer in opened.layers}
    layout = open_bundle(out).manifest.tables
    assert layout is not None
    oracle = Rounded(stem.oracle.config, stem.oracle.tensors, rows, layout)
    cases = [*product(CASES[::3], ["positions", "everywhere"], [None, [2]])]
    for engine in ("onnxruntime", "ggml") if HAS_GGML else ("onnxruntime",):
        with load_fixed(bundle_for(out, engine), engine=engine, slots=5) as model:
            check_cases(model, oracle, cases)


def stem_rows(oracle: Oracle, stem_ids: Sequence[int | Sequence[int]]) -> Rows:
    return {
        layer: torch.stack(
            [table[one].mean(0) if isinstance(one, list) else table[one] for one in stem_ids]
        )
        for layer, table in oracle.rows.items()
    }


def test_stem_ids_can_be_given(any_model: Tried, engine: EngineName) -> None:
    oracle, rng = any_model.oracle, np.random.default_rng(5)
    with load_fixed(
        bundle_for(any_model.path, engine), engine=engine, slots=fewest(any_model)
    ) as model:
        ids = model.tokenize(PROMPT)
        others: Any = rng.integers(0, 260, len(ids))
        expected = oracle.logits(ids, stem_rows(oracle, others.tolist()))
        given: Any
        for given in (
            others,
            others.tolist(),
            others.astype(np.int32),
            [[n] for n in others],
            others[:, None],
            tuple(others.tolist()),
        ):
            assert off(model.logits(ids, stem_ids=given), expected) < TOLERANCE
        pieces = np.concatenate([one.copy() for one in model.logits_chunks(ids, stem_ids=others)])
        assert off(pieces, expected) < TOLERANCE
        first = next(tokens(model.generate(ids, stem_ids=others, max_new_tokens=1)))
        assert first == int(expected[-1].argmax())
        assert np.array_equal(model.logits(ids, stem_ids=ids), model.logits(ids))
        several: list[Any] = [[n, (n + 1) % 260, 7] for n in others.tolist()]
        if oracle.config.n_experts:
            with pytest.raises(InputError, match="mean of experts"):
                model.logits(ids, stem_ids=several)
            return
        expected = oracle.logits(ids, stem_rows(oracle, several))
        assert off(model.logits(ids, stem_ids=several), expected) < TOLERANCE
        array: Any = np.array(several)
        assert off(model.logits(ids, stem_ids=array), expected) < TOLERANCE
        # Only the bundle's own rows, because edits hold for generated tokens only.
        edits = [swap(model, "cat", "dog"), swap(model, "h", "x", scope="everywhere")]
        with model.edited(*edits):
            assert off(model.logits(ids, stem_ids=several), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("stem_ids", "message"),
    [
        ([], "0 stem_ids for 3 tokens"), ([1, 2], "2 stem_ids for 3 tokens"),
        (np.zeros(4, int), "4 stem_ids for 3 tokens"), ([1, -1, 2], r"stem_ids\[1\]: token id -1"),
        ([1, 2, 260], r"stem_ids\[2\]: token id 260 .* 0..259"),
        ([1, [5, 10**30], 2], r"stem_ids\[1\]: token id 1000000000"),
        ([1, [], 2], "none at position 1"), ([1, 2.0, 3], r"stem_ids\[1\]: .*integers"),
        ([1, None, 3], r"stem_ids\[1\]: .*integers"), ([True, 2, 3], r"stem_ids\[0\]: .*integers"),
        (np.array([True, False, True]), r"stem_ids\[0\]: .*integers"),
        (np.ones(3), r"stem_ids\[0\]: .*integers"), ([1, [[2]], 3], r"stem_ids\[1\]: .*integers"),
        (["a", "b", "c"], r"stem_ids\[0\]: .*integers"), ("abc", r"stem_ids\[0\]: .*integers"),
        (5, "must be a sequence"),
        pytest.param(iter([1, 2, 3]), "must be a sequence", id="iterator"),
        ({1, 2, 3}, "must be a sequence"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_stem_ids_are_refused_at_the_call(
    stem_ids: Any, message: str, tiny_model: Model
) -> None:
    for call in (tiny_model.logits, tiny_model.logits_chunks, tiny_model.generate):
        with pytest.raises(InputError, match=message):
            call([1, 2, 3], stem_ids=stem_ids)


def test_a_dense_model_has_nothing_to_edit(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", ModelConfig(**(SIZES | VARIANTS["dense"])))
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "out", type="fp32")
    with pytest.raises(InputError, match="dense"):
        stem_edge.make_edit(tmp_path / "out", "cat", "dog")
    with pytest.raises(InputError, match="dense"):
        stem_edge.make_row_edit(tmp_path / "out", {5: [[1.0]]})
    with load_fixed(tmp_path / "out") as model, model.edited():
        assert model.logits([1, 2]).shape == (2, 260)
        with pytest.raises(InputError, match="dense"):
            model.logits([1, 2], stem_ids=[1, 2])


def test_experts_have_no_mean(tmp_path: Path) -> None:
    path = exact_stem(tmp_path, HASHED, 4, ggml=False).path
    for scope in SCOPES:
        with pytest.raises(InputError, match="mean of experts"):
            stem_edge.make_edit(path, "cat", "horse", scheme="average", scope=scope)
        stem_edge.make_edit(path, "cat", "horse", scope=scope)


@pytest.mark.parametrize("prefill_graph", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_an_edit_is_what_its_stem_ids_are(scope: Scope, prefill_graph: bool) -> None:
    """Logits are equal bit for bit in both graphs, because int8 rows are copied, not rounded."""
    prompt = "The capital of Spain is Madrid, and that of Spain is"
    with load_with(DEMO, prefill=prefill_graph, slots=8) as model:
        ids, others = model.tokenize(prompt), model.tokenize(prompt.replace("Spain", "Germany"))
        assert len(ids) == len(others)
        edit = stem_edge.make_edit(model.bundle, "Spain", "Germany", scope=scope, scheme="swap")
        expected = model.logits(ids, stem_ids=others)
        with model.edited(edit):
            assert np.array_equal(model.logits(ids), expected)
            texts = [model.generate_text(prompt, max_new_tokens=8, temperature=0)]
        texts.append(model.generate_text(ids, stem_ids=others, max_new_tokens=8, temperature=0))
        assert texts[0] == texts[1]
        assert not np.array_equal(model.logits(ids), expected)

"""Rows of per-layer embeddings do what a STEM model's rows do: edits, caches, ways of reading.

The reference is transformers, whose table of per-layer embeddings is changed like an edit changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma_folders import logits, write_gemma
from loading import load_fixed
from tiers import slow_but

import stem_edge
from stem_edge import Edit
from stem_edge.numerics.block_search import least_error_scales
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.consistency import verify_runs
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import CRC_NBYTES

TOLERANCE = 5e-4
PIECES = 3  # of a record: 2 of 6 layers each, because the first 4 have K and V of their own
PROMPT = "the capital of Paris and the city to the river, Paris"
Tables = dict[int, F32]  # token -> rows [layers, width]

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@dataclass(frozen=True)
class Made:
    """A bundle, and the model in transformers with the rows that the bundle stores."""

    path: Path
    model: Any
    rows: F32  # [V, layers, width]
    layout: RecordLayout

    def mean(self, tokens: list[int]) -> F32:
        """Return the mean rows [layers, width] of tokens, rounded like rows of the layout."""
        return self.rounded(self.rows[tokens].mean(0))

    def rounded(self, rows: F32) -> F32:
        packed = pack_records(self.layout, [row[None] for row in rows], least_error_scales)
        layers = range(len(self.layout.layers))
        return np.stack([self.layout.unpack(packed, layer)[0] for layer in layers])

    @contextmanager
    def changed(self, rows: Mapping[int, F32]) -> Iterator[Any]:
        """Give tokens other rows [layers, width] while the context lasts."""
        table = self.model.model.embed_tokens_per_layer.weight
        before = table.detach().clone()
        with torch.no_grad():
            for token, values in rows.items():
                table[token] = torch.from_numpy(values.reshape(-1))
        try:
            yield self.model
        finally:
            with torch.no_grad():
                table.copy_(before)


@pytest.fixture(
    scope="module",
    params=["fp32", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int4", "int8"))],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("gemma")
    model = write_gemma(folder / "checkpoint")
    bundle = stem_edge.export_bundle(
        folder / "checkpoint", folder / "out", type="fp32", rows=request.param
    )
    layout = bundle.manifest.tables
    assert layout is not None
    with stem_edge.open_tables(bundle.path) as tables:
        rows = np.stack([tables[:, layer] for layer in tables.layers], axis=1)
    exact = model.model.embed_tokens_per_layer.weight.detach().numpy().reshape(rows.shape)
    apart = np.abs(rows - exact).max() / np.abs(exact).max()
    assert apart == 0 if request.param == "fp32" else 0 < apart < 0.1
    made = Made(bundle.path, model, rows, layout)
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight.copy_(
            torch.from_numpy(rows.reshape(len(rows), -1))
        )
    return made


def one(model: Model, word: str) -> int:
    """Return the token of a word within a text."""
    (token,) = model.tokenize(f" {word}", add_special_tokens=False)
    return token


def exchange(source: str, target: str, **options: Any) -> Callable[[Model, Made], Edit]:
    return lambda model, made: stem_edge.make_edit(model.bundle, source, target, **options)


def values(made: Made) -> F32:
    spread = float(made.rows.std())
    return np.random.default_rng(4).normal(0, spread, made.rows.shape[1:]).astype(np.float32)


def some(made: Made, rows: F32, own: int, layers: list[int]) -> F32:
    """Return a token's own rows, with those of these layers replaced."""
    found: F32 = made.rows[own].copy()
    found[layers] = rows[layers]
    return found


# How an edit is made, and which rows of transformers it changes.
EDITS: dict[str, tuple[Callable[[Model, Made], Edit], Callable[[Model, Made], Tables]]] = {
    "exchange everywhere": (
        exchange("Paris", "river", scope="everywhere"),
        lambda model, made: {one(model, "Paris"): made.rows[one(model, "river")]},
    ),
    # Each occurrence in the prompt is a word, so that both scopes do the same there.
    "exchange at positions": (
        exchange("Paris", "river"),
        lambda model, made: {one(model, "Paris"): made.rows[one(model, "river")]},
    ),
    "exchange of several tokens": (
        exchange("Paris and", "city of", scheme="swap", scope="everywhere"),
        lambda model, made: {
            one(model, "Paris"): made.rows[one(model, "city")],
            one(model, "and"): made.rows[one(model, "of")],
        },
    ),
    # Layers 0 and 3 have K and V of their own, 4 and 5 borrow them.
    "exchange in some layers": (
        exchange("city", "Paris", scope="everywhere", layers=[0, 3, 5]),
        lambda model, made: {
            one(model, "city"): some(
                made, made.rows[one(model, "Paris")], one(model, "city"), [0, 3, 5]
            )
        },
    ),
    "mean of several tokens": (
        exchange("Paris", "river of city", scheme="average", scope="everywhere"),
        lambda model, made: {
            one(model, "Paris"): made.mean([one(model, word) for word in ("river", "of", "city")])
        },
    ),
    "rows of other values": (
        lambda model, made: stem_edge.make_row_edit(
            model.bundle, {one(model, "Paris"): values(made), one(model, "to"): -values(made)}
        ),
        lambda model, made: {
            one(model, "Paris"): made.rounded(values(made)),
            one(model, "to"): made.rounded(-values(made)),
        },
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_the_same_change_of_the_table_in_transformers(name: str, made: Made) -> None:
    make, change = EDITS[name]
    with load_fixed(made.path, slots=8) as model:
        ids = model.tokenize(PROMPT)
        before = model.logits(ids)
        assert np.abs(before - logits(made.model, ids)).max() < TOLERANCE
        edit = make(model, made)
        with made.changed(change(model, made)) as changed:
            expected = logits(changed, ids)
        with model.edited(edit):
            found = model.logits(ids)
        assert np.abs(found - expected).max() < TOLERANCE
        assert np.abs(found - before).max() > 100 * TOLERANCE
        assert np.array_equal(model.logits(ids), before)


def test_a_text_generated_within_an_edit(made: Made) -> None:
    """Greedy, with a token edited that the model writes itself, from a saved file."""
    with load_fixed(made.path, slots=8) as model:
        ids = model.tokenize(PROMPT)

        def greedy() -> list[int]:
            chunks = model.generate(ids, max_new_tokens=12)
            return [token for chunk in chunks for token in chunk.token_ids]

        def reference(model: Any) -> list[int]:
            found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
            return [int(token) for token in found[0][len(ids) :]]

        plain = greedy()
        assert plain == reference(made.model)
        written, rows = plain[1], made.rows[one(model, "river")]
        edit = stem_edge.make_row_edit(model.bundle, {written: rows})
        edit.save(file := made.path.parent / "written.edit")
        with made.changed({written: made.rounded(rows)}) as changed, model.edited(file):
            edited = greedy()
            assert edited == reference(changed)
        assert edited != plain


WAYS: list[dict[str, Any]] = [
    {"slots": 4}, {"slots": 4, "overlap": False}, {"slots": 5},
    {"slots": 7, "warm_start": False}, {"resident": True}, {"slots": 9, "emulate_flash": "sdcard"},
    {"resident": True, "overlap": False}, {"context_length": 48},
]  # fmt: skip


@pytest.mark.parametrize("options", slow_but(WAYS[:1] + WAYS[-2:-1], WAYS), ids=str)
def test_however_rows_come(options: dict[str, Any], made: Made) -> None:
    """Prompts read the first rows of records alone, logits of every position all of them."""
    make, change = EDITS["mean of several tokens"]
    with load_fixed(made.path, **options) as model:
        ids = model.tokenize(PROMPT) * 3

        def check(reference: Any) -> None:
            expected = logits(reference, ids)
            for _ in range(2):
                (chunk,) = model.generate(ids, max_new_tokens=1)
                assert chunk.token_ids == [expected[-1].argmax()]
                assert np.abs(model.logits(ids) - expected).max() < TOLERANCE

        check(made.model)
        with made.changed(change(model, made)) as changed, model.edited(make(model, made)):
            check(changed)
        check(made.model)


def test_each_row_is_read_once_and_found_again_after_a_warm_start(made: Made) -> None:
    record = made.layout.record_nbytes + PIECES * CRC_NBYTES
    read = []
    for prompts in (2, 1):
        with load_fixed(made.path, slots=16) as model:
            ids = model.tokenize(PROMPT) * 4
            distinct = len(set(ids))
            for _ in range(prompts):
                model.logits(ids)
                read.append(model.stats.flash_bytes)
    assert read == [distinct * record, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_all_ways_of_running_give_the_same_tokens(bits: Any, tmp_path: Path) -> None:
    write_gemma(tmp_path / "checkpoint")
    stem_edge.export_bundle(
        tmp_path / "checkpoint", tmp_path / "out", type=bits, rows=bits, prefill_graph=True
    )
    found = verify_runs(tmp_path / "out")
    assert found.pop("drafts").startswith("not run")
    assert set(found.values()) == {"ok"}

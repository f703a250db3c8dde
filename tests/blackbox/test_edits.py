"""Edits: which rows each scheme and scope looks up, by the reference; when they begin and end; refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import oracle
import pytest
from installed import DEMO, needs_ggml
from models import GGML, KINDS, ORT
from oracle import Oracle, RowOf
from ways import Case, answered

import stem_edge
from stem_edge.errors import EditError, InputError
from stem_edge.runtime import Model

PROMPT = "A cat met (dolphin) but no horse, cat."
# Scheme, source, target, and whose row, or mean of rows, each letter of the source looks up; ^ is padding.
SCHEMES: list[tuple[Any, str, str, list[str]]] = [
    ("swap", "cat", "dog", ["d", "o", "g"]),
    ("pad-left", "horse", "dog", ["^", "^", "d", "o", "g"]),
    ("pad-right", "horse", "dog", ["d", "o", "g", "^", "^"]),
    ("copy", "dolphin", "dog", ["d", "d", "o", "o", "g", "g", "g"]),
    ("copy", "horse", "fly", ["f", "l", "y", "y", "y"]),
    ("subset", "cat", "horse", ["r", "s", "e"]),
    ("average", "cat", "horse", ["horse"] * 3),
    ("average", "dolphin", "zoo", ["zoo"] * 7),
    ("average", "cat", "dog", ["dog"] * 3),
    *((scheme, "cat", "dog", ["d", "o", "g"]) for scheme in ("pad-left", "pad-right", "copy", "subset")),
    ("auto", "cat", "ape", ["a", "p", "e"]),
    ("auto", "cat", "mouse", ["u", "s", "e"]),
    ("auto", "horse", "ox", ["o", "o", "x", "x", "x"]),
]  # fmt: skip


def row_of(ids: Sequence[int], prompt: int, source: str, letters: list[str], scope: str) -> RowOf:
    """Whose row each token has: at places of the source in the prompt, or at its letters everywhere."""
    text, found = bytes(t if t < 256 else 0 for t in ids[:prompt]), list[int | tuple[int, ...]](ids)
    for at, token in enumerate(ids):
        place = source.find(chr(token)) if token < 256 else -1
        if scope == "positions":
            starts = [n for n in range(prompt) if text[n:].startswith(source.encode())]
            place = next((at - n for n in starts if 0 <= at - n < len(source)), -1)
        if place >= 0:
            row = (ids[0],) if letters[place] == "^" else tuple(letters[place].encode())
            found[at] = row if len(row) > 1 else row[0]
    return found


@pytest.fixture
def case(shared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    name, engine = getattr(request, "param", ("stem", ORT))
    reference = oracle.reference_of(name, shared)
    return Case(name, engine, shared, tmp_path, Oracle(reference, KINDS[name]))


@pytest.fixture
def model(case: Case) -> Iterator[Model]:
    with case.load(slots=8) as model:
        yield model


def swap(model: Model, source: str, target: str, **options: Any) -> stem_edge.Edit:
    return stem_edge.make_edit(model.bundle, source, target, scheme="swap", **options)


@pytest.mark.parametrize(
    "case",
    [("stem", ORT), pytest.param(("mixture", GGML), marks=[needs_ggml, pytest.mark.slow])],
    indirect=True,
)
@pytest.mark.parametrize("scope", ["positions", "everywhere"])
def test_every_scheme(case: Case, scope: Any) -> None:
    with case.load() as model:
        ids = model.tokenize(PROMPT)
        before, layers = model.logits(ids), model.config.stem_layers
        for number, (scheme, source, target, letters) in enumerate(SCHEMES):
            some = layers[number % 2 :]  # all, or the last
            edit = stem_edge.make_edit(
                model.bundle, source, target, scheme=scheme, scope=scope, layers=some
            )
            expected = case.oracle.reference.logits(
                ids, row_of(ids, len(ids), source, letters, scope), some
            )
            with model.edited(edit):
                found = model.logits(ids)
            case.oracle.compare(found, expected)
            assert np.abs(found - before).max() > 1e-3, scheme
        assert np.array_equal(model.logits(ids), before)


@pytest.mark.parametrize("case", [("hash-moe", ORT)], indirect=True)
def test_edits_of_one_layer_where_all_experts_are_in_memory(case: Case) -> None:
    """Rows that differ by layer are more than there are slots, until their edit ends."""
    with case.load(resident=True) as model:
        ids, layers = model.tokenize(PROMPT), model.config.stem_layers[:1]
        before = model.logits(ids)
        for pair in (("cat", "dog"), ("horse", "mouse"), ("cat", "dog")):
            edit = swap(model, *pair, scope="everywhere", layers=layers)
            rows = row_of(ids, len(ids), pair[0], [*pair[1]], "everywhere")
            expected = case.oracle.reference.logits(ids, rows, layers)
            with model.edited(edit):
                case.oracle.compare(model.logits(ids), expected)
            case.oracle.compare(model.logits(ids), before)


def test_an_answer_has_the_edits_that_were_open_when_it_began(case: Case, model: Model) -> None:
    """One at places of the prompt, and one at letters that the model writes itself."""
    ids = model.tokenize(PROMPT)
    written = [chr(token) for token in answered(model, ids).ids if 32 < token < 127]
    source = "".join(dict.fromkeys(letter for letter in written if letter not in "catdog"))[:2]
    letters = ["d", "o"][: len(source)]
    edits = swap(model, source, "do"[: len(source)], scope="everywhere"), swap(model, "cat", "dog")
    before = model.generate(ids, max_new_tokens=24)
    first = next(before).token_ids
    with model.edited(edits[0]), model.edited(edits[1]) as same:
        assert same is model and [*model.edits] == [*edits]
        inside, late = (model.generate(ids, max_new_tokens=24) for _ in range(2))
        began = next(inside).token_ids
        many = model.generate_many(iter([ids]), max_new_tokens=24)
        first = first + next(before).token_ids
    assert not model.edits
    plain = first + [token for chunk in before for token in chunk.token_ids]
    edited = began + [token for chunk in inside for token in chunk.token_ids]
    assert edited == [token for chunk in late for token in chunk.token_ids] != plain
    assert edited == [token for _, chunk in many for token in chunk.token_ids]
    case.check(ids, oracle.Answer(plain, reason="length"))
    both = row_of([*ids, *edited], len(ids), source, letters, "everywhere")
    places = row_of(ids, len(ids), "cat", ["d", "o", "g"], "positions")
    looked_up = [
        place if place != own else row for place, own, row in zip(places, ids, both, strict=False)
    ]
    answer = oracle.Answer(edited, reason="length")
    case.check(ids, answer, [*looked_up, *both[len(ids) :]])


def test_edits_end_in_any_order_and_after_errors(model: Model, tmp_path: Path) -> None:
    one, two = swap(model, "cat", "dog"), swap(model, "cat", "cow")
    first, second, third = model.edited(one), model.edited(two), model.edited(one)
    for context in (first, second, third):
        context.__enter__()
    first.__exit__(None, None, None)
    assert [*model.edits] == [two, one]
    for context in (third, second):
        context.__exit__(None, None, None)
    with pytest.raises(ZeroDivisionError), model.edited(one):
        1 / 0  # noqa: B018
    (tmp_path / "bad.edit").write_text("{}")
    with pytest.raises(EditError, match=r"bad\.edit"), model.edited(one, tmp_path / "bad.edit"):
        pytest.fail("was let in")
    one.save(tmp_path / "good.edit")
    with model.edited(str(tmp_path / "good.edit")):
        assert [*model.edits] == [one]
    assert not model.edits


def test_an_edited_prompt_fills_the_context(case: Case) -> None:
    with case.load(context_length=16, slots=8) as model:
        ids = model.tokenize("a cat and a cat")
        with model.edited(stem_edge.make_edit(model.bundle, "cat", "mouse", scheme="average")):
            expected = row_of(ids, 16, "cat", ["mouse"] * 3, "positions")
            found = answered(model, ids)
            assert (len(found.ids), found.reason) == (1, "length")
            case.oracle.check(ids, found, expected)
            with pytest.raises(InputError, match="17 tokens"):
                model.generate("a cat and a cats")


def test_an_edit_that_does_not_apply_is_refused_at_the_call(model: Model) -> None:
    absent = pytest.raises(InputError, match="'cat' is not in the prompt")
    with model.edited(swap(model, "cat", "dog")), absent:
        model.generate("no such animal")


@pytest.mark.parametrize(
    ("stem_ids", "message"),
    [
        ([], "0 stem_ids for 3 tokens"), (np.zeros(4, int), "4 stem_ids for 3 tokens"),
        ([1, -1, 2], r"stem_ids\[1\]: token id -1"),
        ([1, 2, 260], r"stem_ids\[2\]: token id 260 .* 0..259"),
        ([1, [5, 10**30], 2], r"stem_ids\[1\]: token id 1000000000"),
        ([1, [], 2], "none at position 1"), ([1, 2.0, 3], r"stem_ids\[1\]: .*integers"),
        ([True, 2, 3], r"stem_ids\[0\]: .*integers"), (np.ones(3), r"stem_ids\[0\]: .*integers"),
        ("abc", r"stem_ids\[0\]: .*integers"), (5, "must be a sequence"), ({1, 2, 3}, "must be a sequence"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_stem_ids_are_refused_at_the_call(
    stem_ids: Any, message: str, model: Model
) -> None:
    for call in (model.logits, model.logits_chunks, model.generate):
        with pytest.raises(InputError, match=message):
            call([1, 2, 3], stem_ids=stem_ids)


def test_means_of_rows_can_be_given(case: Case, model: Model) -> None:
    ids = model.tokenize("a cat")
    several: list[Any] = [[token, (token + 1) % 250, 7] for token in ids]
    expected = case.oracle.reference.logits(ids, [tuple(one) for one in several])
    given: Any
    for given in (several, np.array(several)):
        case.oracle.compare(model.logits(ids, stem_ids=given), expected)
    with model.edited(swap(model, "cat", "dog")):  # which hold for generated tokens only
        case.oracle.compare(model.logits(ids, stem_ids=several), expected)


def test_models_that_have_nothing_to_edit(shared: Path) -> None:
    dense = models.bundle_of("dense", ORT, shared)
    with pytest.raises(InputError, match="dense"):
        stem_edge.make_edit(dense, "cat", "dog")
    with stem_edge.load(dense) as model, pytest.raises(InputError, match="dense"):
        model.logits([1, 2], stem_ids=[1, 2])
    with pytest.raises(InputError, match="mean of experts"):
        stem_edge.make_edit(
            models.bundle_of("hash-moe", ORT, shared), "cat", "horse", scheme="average"
        )
    with (
        stem_edge.load(models.bundle_of("ngrams", ORT, shared)) as model,
        pytest.raises(InputError, match="rows of this model belong to n-grams"),
    ):
        model.logits([1, 2], stem_ids=[1, 3])


@pytest.mark.parametrize("scope", ["positions", "everywhere"])
def test_an_edit_is_what_its_stem_ids_are(scope: Any) -> None:
    """Logits are equal bit for bit, because int8 rows are copied, not rounded."""
    prompt = "The capital of Spain is Madrid, and that of Spain is"
    with stem_edge.load(DEMO, slots=8, threads=1) as model:
        ids, others = model.tokenize(prompt), model.tokenize(prompt.replace("Spain", "Germany"))
        edit = stem_edge.make_edit(model.bundle, "Spain", "Germany", scope=scope, scheme="swap")
        expected = model.logits(ids, stem_ids=others)
        with model.edited(edit):
            assert np.array_equal(model.logits(ids), expected)
        assert not np.array_equal(model.logits(ids), expected)

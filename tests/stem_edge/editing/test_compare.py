"""Comparisons with and without an edit, against softmax of the model's own logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO, needs_ggml

import stem_edge
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.editing.compare import CONTINUED, compare_edits, target_prompt
from stem_edge.editing.plot import plot_comparison
from stem_edge.editing.report import comparison_table
from stem_edge.errors import EditError, InputError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text_table import columns

PROMPT = "The capital of Spain is"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(DEMO / TOKENIZER)


def last_probabilities(model: stem_edge.Model, prompt: str) -> np.ndarray:
    logits = model.logits(model.tokenize(prompt))[-1].astype(np.float64)
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())


def test_each_panel_is_the_softmax_of_its_logits() -> None:
    edit = stem_edge.make_edit(DEMO, "Spain", "Germany")
    with stem_edge.load(DEMO) as model:
        found = compare_edits(model, PROMPT, edit, top=5)
        original = last_probabilities(model, PROMPT)
        target = last_probabilities(model, "The capital of Germany is")
        with model.edited(edit):
            edited = last_probabilities(model, PROMPT)
            text = model.generate_text(PROMPT, max_new_tokens=CONTINUED)
        np.testing.assert_array_equal(last_probabilities(model, PROMPT), original)
    assert found.target is not None
    assert (found.original.prompt, found.edited.prompt) == (PROMPT, PROMPT)
    assert found.target.prompt == "The capital of Germany is"
    assert found.edited.text == text
    assert text.startswith(" Berlin")
    assert found.original.text.startswith(" Madrid")
    panels = (found.original, original), (found.target, target), (found.edited, edited)
    for outcome, expected in panels:
        best = np.argsort(-expected)[:5]
        assert [token.token_id for token in outcome.top] == best.tolist()
        shares = [token.probability for token in outcome.top]
        np.testing.assert_allclose(shares, expected[best], rtol=1e-6)
    for value, p, q in (
        (found.edited_from_target, target, edited),
        (found.original_from_target, target, original),
        (found.edited_from_original, original, edited),
    ):
        assert value == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4)
    assert found.edited_from_target is not None
    assert found.original_from_target is not None
    assert found.edited_from_target < found.original_from_target / 100


def test_a_bundle_is_loaded_with_the_options_and_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "spain.edit"
    stem_edge.make_edit(DEMO, "Spain", "Germany").save(path)
    found = compare_edits(DEMO, PROMPT, path, top=1, context_length=32, slots=40)
    assert (found.bundle, found.engine) == (str(DEMO), "onnxruntime")
    assert found.edited.top[0].text == " Berlin"


@needs_ggml
def test_a_comparison_on_ggml(tiny_gguf: Path) -> None:
    edit = stem_edge.make_edit(tiny_gguf, "ab", "xyz")
    found = compare_edits(tiny_gguf, "say ab now", edit)
    assert found.engine == "ggml"
    assert found.target is not None
    assert found.target.prompt == "say xyz now"
    assert found.edited_from_original > 0


def test_new_rows_have_no_target_prompt() -> None:
    with stem_edge.load(DEMO) as model:
        layout = model.bundle.manifest.tables
        assert layout is not None
        rows = np.zeros((len(layout.layers), layout.row_width), np.float32)
        edit = stem_edge.make_row_edit(DEMO, {" Spain": rows})
        found = compare_edits(model, PROMPT, [edit])
    assert found.target is None
    assert found.edited_from_target is None
    assert found.original_from_target is None
    assert found.edited_from_original > 0
    table = comparison_table(found, [edit])
    assert "new rows of 1 token" in table
    assert "target prompt ||" not in table


def test_targets_replace_sources_in_the_prompt(codec: TextCodec) -> None:
    def words(prompt: str, *pairs: tuple[str, str], scope: str = "positions") -> str | None:
        edits = [stem_edge.make_edit(DEMO, *pair, scope=scope) for pair in pairs]  # type: ignore[arg-type]
        return target_prompt(codec, prompt, edits)

    exchange = ("Spain", "Germany"), ("Germany", "Spain")
    assert words("Spain borders Germany.", *exchange) == "Germany borders Spain."
    twice = words("Spain, and Spain again", ("Spain", "New Zealand"))
    assert twice == "New Zealand, and New Zealand again"
    # The later edit must win, as in the model.
    later = words("in Spain", ("Spain", "Germany"), ("Spain", "France"))
    assert later == "in France"
    assert words("in New Zealand", ("New Zealand", "Côte d'Ivoire")) == "in Côte d'Ivoire"
    assert words("Spaniards", ("Spain", "Germany"), scope="everywhere") is None
    assert words("in France", ("Spain", "Germany")) is None


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    edit = stem_edge.make_edit(DEMO, "Spain", "Germany")
    with stem_edge.load(DEMO) as model:
        cases: list[tuple[Any, Any, int, str]] = [
            (PROMPT, [], 4, "and at least one edit"),
            ("", [edit], 4, "needs a prompt"),
            ([PROMPT], [edit], 4, "needs a prompt"),
            (PROMPT, [5], 4, "an edit is given as int"),
            (PROMPT, [edit], 0, "top is 0; expected 1 to 1756"),
            (PROMPT, [edit], 1757, "top is 1757; expected 1 to 1756"),
            ("The capital of Spian is", [edit], 4, "near it: 'Spian'"),
        ]
        for prompt, edits, top, message in cases:
            with pytest.raises(InputError, match=message):
                compare_edits(model, prompt, edits, top=top)
        with pytest.raises(InputError, match="threads: for loading"):
            compare_edits(model, PROMPT, edit, threads=2)
        with pytest.raises(EditError, match="no such edit file"):
            compare_edits(model, PROMPT, tmp_path / "no.edit")


def test_tables_fit_a_small_terminal() -> None:
    with stem_edge.load(DEMO) as model:
        prompt = "東京 and a long way from there to the capital of Spain,\nwhich is"
        edit = stem_edge.make_edit(DEMO, "Spain", "Côte d'Ivoire")
        found = compare_edits(model, prompt, edit, top=40)
    lines = comparison_table(found, [edit]).splitlines()
    assert max(map(columns, lines)) <= 80
    assert "\\nwhich is" in "".join(lines)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_plot_of_all_tokens_has_letters_that_its_font_lacks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    edit = stem_edge.make_edit(DEMO, "東京", "Germany")
    found = compare_edits(DEMO, r"It is $\none$ in 東京, which is", edit, top=1756)
    total = math.fsum(token.probability for token in found.edited.top)
    assert total == pytest.approx(1, abs=1e-9)
    for suffix, beginning in {".png": b"\x89PNG\r\n", ".pdf": b"%PDF", ".svg": b"<?xml"}.items():
        plot_comparison(found, path := tmp_path / f"figure{suffix}")
        assert path.read_bytes().startswith(beginning)

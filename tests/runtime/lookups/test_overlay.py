"""Map token ids and a stack of edits to the rows that each position looks up."""

from __future__ import annotations

from typing import Any

import pytest
from text_codecs import END, WORDS, codec_of

from stem_edge.bundle.edit_files.file import Edit
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.overlay import Overlay
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.tables.rows import RowLookup

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec_of(tmp_path_factory.mktemp("words"))


def config_of(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS) + 1,
        "dim": 16,
        "n_layers": 3,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 8,
        "d_ff": 16,
        "stem_layers": LAYERS,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_context": 32,
    }
    return ModelConfig(**(sizes | options))


CONFIG = config_of()


def edit(source: str, target: str, *layers: int, scope: Any = "positions", **options: Any) -> Edit:
    options |= {"source": source, "target": target, "scope": scope}
    return Edit(made_for="0" * 64, layers=layers or LAYERS, **options)


def everywhere(source: str, target: str, *layers: int, **options: Any) -> Edit:
    return edit(source, target, *layers, scope="everywhere", **options)


def named(lookup: RowLookup) -> list[Any]:
    """Words of each layer; a mean as a tuple."""
    found: list[Any] = []
    for row in lookup:
        words = tuple([*WORDS, END][token] for token in row)
        found.append(words[0] if len(words) == 1 else words)
    return found if len(set(found)) > 1 else found[:1]


def looked_up(codec: TextCodec, text: str, *edits: Edit) -> dict[int, list[Any]]:
    """Map positions of a prompt to what they look up, where it is not their own row."""
    overlay = Overlay(codec, CONFIG, edits)
    return {at: named(one) for at, one in overlay.of_prompt(codec.encode(text)).items()}


def of_tokens(codec: TextCodec, *edits: Edit) -> dict[str, list[Any]]:
    overlay = Overlay(codec, CONFIG, edits)
    return {WORDS[token]: named(lookup) for token, lookup in overlay.of_token.items()}


def test_at_positions_every_occurrence_is_edited_and_no_other_place(codec: TextCodec) -> None:
    found = looked_up(codec, "The Spain of Spain.", edit("Spain", "Germany"))
    assert found == {1: ["ĠGermany"], 3: ["ĠGermany"]}
    assert of_tokens(codec, edit("Spain", "Germany")) == {}


def test_the_target_is_cut_as_behind_a_space_if_that_is_shorter_and_fits(codec: TextCodec) -> None:
    for scheme in ("auto", "swap"):
        found = looked_up(codec, "Spain of Spain", edit("Spain", "Germany", scheme=scheme))
        assert found == {0: ["ĠGermany"], 2: ["ĠGermany"]}
    # Two tokens fit where one does not.
    found = looked_up(codec, "Germany", edit("Germany", "Germany", scheme="swap"))
    assert found == {0: ["Ger"], 1: ["many"]}


def test_the_later_edit_holds_in_its_place_and_layers(codec: TextCodec) -> None:
    one, two = edit("Spain", "Chad"), edit("Spain", "Germany", 1)
    assert looked_up(codec, "The Spain", one, two) == {1: ["ĠGermany", "ĠChad"]}
    assert looked_up(codec, "The Spain", two, one) == {1: ["ĠChad"]}
    wide = everywhere("Spain", "Oman", scheme="average")
    assert looked_up(codec, "The Spain of Spain", one, wide) == {1: ["ĠOman"], 3: ["ĠOman"]}
    assert looked_up(codec, "The Spain of Spain", wide, one) == {1: ["ĠChad"], 3: ["ĠChad"]}


def test_targets_are_the_bundles_own_rows(codec: TextCodec) -> None:
    """Two edits can exchange two words, because edits are not chained."""
    there, back = edit("Spain", "Chad"), edit("Chad", "Spain")
    exchanged = {1: ["ĠChad"], 3: ["ĠSpain"]}
    assert looked_up(codec, "The Spain of Chad", there, back) == exchanged
    assert looked_up(codec, "The Spain of Chad", back, there) == exchanged
    wide = [everywhere(*pair, scheme="average") for pair in (("New", "Spain"), ("Spain", "New"))]
    found = of_tokens(codec, *wide)
    assert (found["ĠNew"], found["ĠSpain"]) == (["ĠSpain"], ["ĠNew"])
    assert found == of_tokens(codec, *reversed(wide))


def test_everywhere_a_word_is_edited_in_each_of_its_shortest_forms(codec: TextCodec) -> None:
    found = of_tokens(codec, everywhere("Spain", "Germany"))
    assert found == {"ĠSpain": ["ĠGermany"], "Spain": ["ĠGermany"]}
    # "Ch" and "ad" are in other words too.
    assert of_tokens(codec, everywhere("Chad", "Spain")) == {"ĠChad": ["ĠSpain"]}
    with pytest.raises(InputError, match="swap does not fit a source of 1 and a target of 2"):
        of_tokens(codec, everywhere("Spain", "New Zealand", scheme="swap"))


def test_a_prompt_needs_one_source_of_edits_at_positions(codec: TextCodec) -> None:
    both = [edit("Spain", "Chad"), edit("Oman", "Chad")]
    assert looked_up(codec, "The Spain", *both) == looked_up(codec, "The Spain", both[0])
    with pytest.raises(InputError, match="'Spain' is not in the prompt"):
        looked_up(codec, "The Chad", *both)
    with pytest.raises(InputError, match="'Oman' is not in the prompt"):
        looked_up(codec, "The Spain", everywhere("Spain", "Chad"), both[1])

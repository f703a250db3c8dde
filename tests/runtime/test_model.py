"""Model, as Python users call it, with the demo and with random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO
from loading import load_fixed
from prompt_graph import without_prompt_graph

import stem_edge
from stem_edge.errors import BundleError, InputError
from stem_edge.runtime import Model

# The demo at temperature 0. Other tokens here mean that existing bundles no longer work.
GOLDEN = {
    "The capital of France is": " Paris. It is a country in Europe.",
    "What is the currency of Mexico? It is the": " Mexican peso.",
}


@pytest.mark.parametrize("prompt", GOLDEN)
def test_golden_text(model: Model, prompt: str) -> None:
    assert model.generate_text(prompt).startswith(GOLDEN[prompt])


def test_chunks_join_to_text_and_tokens(model: Model) -> None:
    prompt = "The capital of Brazil is"
    chunks = list(model.generate(prompt, max_new_tokens=30))
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert "".join(chunk.text for chunk in chunks) == model.detokenize(ids)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason in ("stop", "length")
    assert len(chunks) > 2
    stats, tables = model.stats, model.bundle.manifest.tables
    processed = len(model.tokenize(prompt)) + len(ids) - 1  # the last new token is not
    assert tables and stats.row_hits + stats.row_misses == processed
    assert stats.flash_bytes == stats.row_misses * (tables.record_nbytes + 4)


def test_an_end_token_ends_with_stop_and_has_no_text(model: Model) -> None:
    chunks = list(model.generate("The capital of France is", max_new_tokens=200))
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].token_ids[-1] in model.config.eos_ids
    assert "<|" not in "".join(chunk.text for chunk in chunks)


def test_a_stop_text_is_cut_off(model: Model) -> None:
    chunks = list(model.generate("The capital of France is", stop=["aris.", "zzz"]))
    assert "".join(chunk.text for chunk in chunks) == " P"
    assert chunks[-1].finish_reason == "stop"


def test_options_and_params_are_the_same_thing(model: Model) -> None:
    params = stem_edge.SamplingParams(max_new_tokens=5)
    assert model.generate_text("The", params) == model.generate_text("The", max_new_tokens=5)
    with pytest.raises(InputError, match="not both"):
        model.generate("The", params, seed=1)
    with pytest.raises(TypeError, match="no option max_tokens; use max_new_tokens"):
        model.generate("The", max_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"use stem_edge.load\(path\)"):
        Model("x")  # type: ignore[arg-type, call-arg]
    with pytest.raises(InputError, match="the text is of type list; give a str"):
        model.tokenize(["a", "b"])  # type: ignore[arg-type]
    assert model.generate_text("The capital of France is", stop=".") == " Paris"


def test_logprobs_are_of_the_model_not_of_the_filters(tmp_path: Path) -> None:
    model = load_fixed(without_prompt_graph(DEMO, tmp_path / "demo"))
    prompt = model.tokenize("The capital of Chad is")
    chunks = list(model.generate(prompt, max_new_tokens=3, logprobs=2, temperature=0.5, top_k=1))
    found = [one for chunk in chunks for one in chunk.logprobs or []]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    logits = model.logits(prompt + ids).astype(np.float64)[len(prompt) - 1 :]
    for one, token, row in zip(found, ids, logits, strict=False):
        expected = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert one.token_id == token
        assert one.logprob == pytest.approx(expected, abs=1e-3)
        assert len(one.top) == 2
        assert one.top[0][1] >= one.top[1][1]
    assert len(found) == len(ids) == 3
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 0}, "context_length is 0; this model takes 1 to 256"),
        ({"context_length": 257}, "takes 1 to 256"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 100_000}, "threads is 100000; expected 1 to .* CPUs; leave it out"),
        ({"threads": "2"}, "threads is '2'; expected a whole number"),
        ({"context_length": True}, "context_length is True; expected a whole number"),
        ({"memory": True}, "size True is not understood"),
        ({"memory": "lots"}, "not understood"),
        ({"device_memory": "much"}, "much"),
        ({"device_memory": "60MB", "slots": 0}, "slots is 0"),
        ({"engine": "llama"}, "engine is 'llama'; expected one of auto, onnxruntime, ggml"),
        ({"prompt_cache": DEMO}, "is a bundle"),
        ({"prompt_cache": "a\0b"}, "null"),
        ({"provider": " "}, "provider is empty"),
        *(
            ({"speculate": wrong}, r"speculate is .*; expected 'auto', True .* \(up to 7\)")
            for wrong in ("yes", -1, 8, 1.5, None)
        ),
    ],
    ids=str,
)
def test_bad_options_of_load(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_fixed(DEMO, **options)


def test_a_dense_model(dense_bundle: Path) -> None:
    with pytest.raises(BundleError, match="a dense model, which has no tables"):
        stem_edge.open_tables(dense_bundle)
    with stem_edge.load(dense_bundle) as model:
        assert model.plan.slots == 0
        list(model.generate([1, 2, 3], max_new_tokens=3))
        assert (model.stats.row_hits, model.stats.flash_bytes) == (0, 0)

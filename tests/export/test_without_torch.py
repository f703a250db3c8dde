"""An export needs neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import SIZES, write
from exports import contents
from hf_folders import make_model
from installed import DATA
from make_checkpoint import Shape, write_checkpoint
from tokenizers import Tokenizer, models
from trained_tokenizers import train_ranks, train_sp, write_ranks

import stem_edge
from stem_edge.config import ModelConfig

EXPORT = """
import sys
sys.modules |= {"torch": None, "transformers": None}  # so that importing one raises
import stem_edge
for checkpoint, out in zip(sys.argv[2::2], sys.argv[3::2]):
    stem_edge.export_bundle(checkpoint, out, calibration=sys.argv[1], threads=1, progress=False)
"""


def write_lingua(folder: Path, kind: str, tokenizer: Path) -> Path:
    """Write a checkpoint of the public STEM trainer with this tokenizer."""
    write_checkpoint(folder, Shape(vocab_size=700, n_layers=2, d_ff=32, stem_layers=(1,)))
    params = json.loads((folder / "params.json").read_text())
    params["data"]["tokenizer"] = {"name": kind, "path": str(tokenizer)}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def write_dense(folder: Path) -> Path:
    """Write a Llama as Hugging Face has it."""
    make_model("llama").save_pretrained(folder)
    vocab = {chr(ord("!") + number): number for number in range(90)}
    Tokenizer(models.WordLevel(vocab, unk_token="!")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_every_kind_of_checkpoint_gives_the_same_bundle(tmp_path: Path) -> None:
    train_sp(tmp_path / "sp.model")
    ranks = write_ranks(tmp_path / "ranks.tiktoken", train_ranks(400))
    checkpoints = [
        DATA / "conformance/full/training",
        DATA / "conformance/blagpt-full",
        DATA / "conformance/gemma4-text",
        write_lingua(tmp_path / "sp", "sp", tmp_path / "sp.model"),
        write_lingua(tmp_path / "tiktoken", "tiktoken", ranks),
        write_dense(tmp_path / "dense"),
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

"""Gemma's text in and out: odd texts, chats, where a text ends, tokens that are no text, commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gemma_folders import BOS, END_OF_TURN, EOS, IMAGE, write_gemma
from hf_folders import edit, wrap_gemma
from tokenizers import Tokenizer
from trained_tokenizers import TEXTS

import stem_edge
from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.runtime import Model
from stem_edge.runtime.text.stream import TokenStream

Capture = pytest.CaptureFixture[str]
CHATS = [
    [("user", "Hello  there\n")],
    [("user", " a "), ("assistant", "\n\nYes.  \n"), ("user", "東京都 😀\tb")],
]
EXACT: dict[str, Any] = {"type": "fp32", "rows": "fp32"}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma") / "checkpoint"
    write_gemma(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return stem_edge.export_bundle(checkpoint, checkpoint.parent / "out", **EXACT).path


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with stem_edge.load(bundle) as loaded:
        yield loaded


def tokens(model: Model, ids: list[int], count: int = 12) -> list[int]:
    return [t for chunk in model.generate(ids, max_new_tokens=count) for t in chunk.token_ids]


# ---------------------------------------------------------------- tokenizer


def test_texts_are_tokenized_as_by_the_tokenizers_library(checkpoint: Path, model: Model) -> None:
    """Odd ones, too: bytes for unknown characters, spaces in a row, names of tokens as text."""
    own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    named = [*TEXTS, "a<end_of_turn>b", "<bos>", "\n\n\n", "\u2581\u2581 \u2581"]
    fallback = 0
    for text in named:
        expected = own.encode(text)
        fallback += any(token.startswith("<0x") for token in expected.tokens)
        assert theirs(text).input_ids == expected.ids
        assert model.tokenize(text, special_tokens_in_text=True) == expected.ids
        ids = model.tokenize(text)
        assert ids[0] == BOS
        assert not {EOS, BOS, END_OF_TURN, IMAGE} & set(ids[1:])
        assert model.detokenize(ids) == own.decode(ids) == theirs.decode(ids, True)
    assert fallback > 100


def test_a_text_comes_in_pieces_as_it_comes_at_once(model: Model) -> None:
    for text in TEXTS:
        ids, stream = model.tokenize(text), TokenStream(model._text)
        pieces = [*[stream.push(token) for token in ids], stream.finish()]
        assert "".join(pieces) == model.detokenize(ids)


# ---------------------------------------------------------------- chats


@pytest.mark.parametrize("turns", CHATS)
def test_a_chat_is_that_of_transformers(
    turns: list[tuple[str, str]], checkpoint: Path, model: Model
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": role, "content": content} for role, content in turns]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        ids = model.tokenize(text := model.chat_prompt(messages, prompt))
        assert text == expected
        assert ids == theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        assert (ids[0], ids.count(BOS), ids.count(END_OF_TURN)) == (BOS, 1, len(turns))
    with pytest.raises(InputError, match="names the special token '<end_of_turn>'"):
        model.chat_prompt([{"role": "user", "content": "a<end_of_turn>"}])


def test_the_command_answers_a_chat_as_transformers_does(
    checkpoint: Path, bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Also where a token of the list in generation_config.json ends the answer."""
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    network = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    message = [{"role": "user", "content": "the river"}]
    ids = theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    with stem_edge.load(bundle) as model:
        assert model.config.eos_ids == (EOS, END_OF_TURN)
        plain = tokens(model, ids)
    last = next(token for at, token in enumerate(plain) if at > 2 and token not in plain[:at])
    ended = tmp_path / "ended"
    ended.mkdir()
    for file in checkpoint.iterdir():
        (ended / file.name).write_bytes(file.read_bytes())
    edit(ended, "generation_config.json", eos_token_id=[EOS, last])
    stem_edge.export_bundle(ended, tmp_path / "out", **EXACT)
    for path, ends in ((bundle, [EOS, END_OF_TURN]), (tmp_path / "out", [EOS, last])):
        command = ["run", str(path), "the river", "--temp", "0", "--json", "-n", "12"]
        assert main(command) == 0
        told = json.loads(capsys.readouterr().out)
        found = network.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=ends
        )
        expected = found[0][len(ids) :].tolist()
        while expected and expected[-1] in ends:
            expected.pop()
        assert [token for token in told["token_ids"] if token not in ends] == expected
    assert told["finish_reason"] == "stop" and expected == plain[: plain.index(last)]


# ---------------------------------------------------------------- tokens that are no text


@pytest.fixture(scope="module")
def multimodal(checkpoint: Path) -> Path:
    folder = checkpoint.parent / "multimodal"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    wrap_gemma(folder, image_token_id=IMAGE)
    return stem_edge.export_bundle(folder, checkpoint.parent / "text only", **EXACT).path


def test_placeholders_are_refused_by_name(multimodal: Path) -> None:
    with stem_edge.load(multimodal) as model:
        for call in (model.generate, model.generate_text, model.logits, model.logits_chunks):
            with pytest.raises(InputError, match=f"token id {IMAGE} .* stands for 'an image'"):
                call([BOS, 300, IMAGE, 301])


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "OUT", "--text", "TEXT"],
        ["measure", "OUT", "--text", "TEXT"],
    ],
    ids=lambda command: " ".join(command[::4]),
)
def test_placeholders_are_refused_by_commands(
    command: list[str], multimodal: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text").write_text("the river <image> the city")
    places = {"OUT": str(multimodal), "TEXT": str(tmp_path / "text")}
    assert main([places.get(word, word) for word in command]) != 0
    assert f"token id {IMAGE} at position" in capsys.readouterr().err


def test_the_name_of_a_placeholder_in_a_prompt_is_text(multimodal: Path) -> None:
    with stem_edge.load(multimodal) as model:
        assert model.generate_text("the <image>", max_new_tokens=2)


# ---------------------------------------------------------------- commands


COMMANDS: list[list[str]] = [
    ["inspect", "OUT"],
    ["inspect", "OUT", "--geometry"],
    ["fit", "OUT", "--memory", "4GB"],
    ["eval", "OUT", "--text", "TEXT", "--against", "CHECKPOINT"],
    ["measure", "OUT", "--prompt-tokens", "40", "-n", "4"],
    ["verify", "OUT"],
    ["edit", "OUT", "--source", "Paris", "--target", "river", "-o", "FILE"],
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[::2]))
def test_commands_take_such_a_bundle(
    command: list[str], checkpoint: Path, bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    text = tmp_path / "text"
    text.write_text("the capital of Paris and the city to the river " * 9)
    places = {"OUT": bundle, "TEXT": text, "CHECKPOINT": checkpoint, "FILE": tmp_path / "an.edit"}
    assert main([str(places.get(word, word)) for word in command]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_parameters_are_those_of_the_checkpoint(checkpoint: Path, bundle: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    model = stem_edge.open_bundle(bundle).manifest.model
    scalars = [layer.layer_scalar for layer in network.model.layers]
    total = sum(one.numel() for one in {*network.parameters(), *scalars})
    table = network.model.embed_tokens_per_layer.weight.numel()
    assert model.table_parameters == table
    assert model.backbone_parameters == total - table
    # The embedding is the head, so that a token needs all of it, and one row of the table.
    assert model.active_parameters == total - table + table // model.vocab_size

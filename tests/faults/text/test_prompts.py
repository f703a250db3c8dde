"""Invalid prompts and options: the answer is defined, and the model goes on working."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import MARKED, write_chat_bundle
from contract import checked_message, command_refused, refused
from installed import DEMO
from loading import load_fixed

from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import Sampler
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.shown import shown

INF, NAN = float("inf"), float("nan")
HUGE = 10**400
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def loaded() -> Iterator[Model]:
    # Its thread must exist before the tests, or no_leaks takes it for one of theirs. It starts with
    # the first row that is missing.
    with load_fixed(DEMO) as model:
        model.generate_text(PROMPT, max_new_tokens=2)
        yield model


@pytest.fixture
def model(loaded: Model) -> Iterator[Model]:
    """A model that must still answer correctly after the test."""
    yield loaded
    assert loaded.generate_text(PROMPT, max_new_tokens=2).startswith(" Paris")


def test_p1_no_prompt_is_refused(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    nothing: list[Any] = ["", [], (), None, 3, b"", b"abc", {}, object()]
    for prompt in nothing:
        refused(partial(model.generate, prompt), InputError)
    command_refused(capsys, ["generate", DEMO, "-p", ""], "the prompt is empty", kept=[DEMO])


@pytest.mark.parametrize("prompt", ["a" * 10_000_000, " " * 10**6, "\U0001f600" * 10**6])
def test_p2_a_prompt_that_cannot_fit_is_refused_untokenized(
    model: Model, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("the tokenizer saw it")

    with monkeypatch.context() as patch:
        patch.setattr(type(model._text), "encode", encode)
        told = (
            f"{len(prompt.encode()):,} bytes",
            "256 tokens",
            f"{256 * 64:,}",
            "this model takes no longer",
        )
        refused(lambda: model.generate(prompt), InputError, *told)


def test_p2_a_prompt_from_stdin_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stem_edge", "generate", str(DEMO)],
        input=b"\xff\xfe" + b"a" * 1000,
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 1
    checked_message(
        done.stderr.decode().strip(), "Unicode" if b"Unicode" in done.stderr else "UTF-8"
    )

    class Endless:
        def isatty(self) -> bool:
            return False

        def read(self, count: int) -> str:
            return "a" * count

    monkeypatch.setattr(sys, "stdin", Endless())
    monkeypatch.setattr("stem_edge.commands.running.generate.MAX_PROMPT_CHARS", 1000)
    assert main(["generate", str(DEMO)]) == 1


@pytest.mark.parametrize("text", ["1.5", "ten", "", "1e3", "0x10", "9" * 5000, "\x1b[31m"])
def test_p3_numbers_of_the_command_are_checked_by_its_usage(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("-n", "--top-k", "--seed"):
        with pytest.raises(SystemExit) as caught:
            main(["generate", str(DEMO), "-p", "a", f"{name}={text}"])
        assert caught.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert "a whole number" in last
        assert len(last) < 300
        assert last.isprintable()


def test_p4_the_ends_of_the_range_sample(capsys: pytest.CaptureFixture[str]) -> None:
    logits = np.array([1.0, -INF, 3e38, -3e38], np.float32)
    for temperature in (5e-324, 1e-30, 1e6):
        choose = Sampler(SamplingParams(temperature=temperature, seed=1))
        assert choose(logits.copy(), []) in (0, 2, 3)
    command_refused(
        capsys, ["generate", DEMO, "-p", "a", "--temperature", "nan"], "temperature is nan"
    )


def test_p8_as_many_as_allowed(model: Model) -> None:
    stops = [f"{number} " + "x" * 1000 for number in range(63)] + ["Paris"]
    assert model.generate_text(PROMPT, max_new_tokens=4, stop=stops) == " "


OPTIONS: dict[str, tuple[list[object], str]] = {
    "max_new_tokens": ([0, -1, 2**63, HUGE, 1.5, "10", True, None, [1], NAN, b"1"], "1 to 2147483647"),
    "temperature": ([-1, -1e-9, NAN, INF, -INF, 1e308, 1_000_001, "1", True, 1j], "0.0 to 1000000.0"),
    "top_p": ([0, -0.1, 2, 1.0000001, NAN, INF, "1", True], "1.0"),
    "top_k": ([-5, 10**10, HUGE, 1.0, "1", False, NAN], "0 to 2147483647"),
    "min_p": ([-0.1, 1.1, NAN, -INF, "0", True], "0.0 to 1.0"),
    "repetition_penalty": ([0, -1, 1e-300, 1e300, NAN, INF, -INF, "1", True], "0.001 to 1000.0"),
    "presence_penalty": ([-2.1, 2.1, NAN, INF, "1", True, None], "-2.0 to 2.0"),
    "frequency_penalty": ([-2.1, 2.1, NAN, -INF, "1", True, None], "-2.0 to 2.0"),
    "logit_bias": ([{-1: 0}, {2**31: 0}, {1.0: 0}, {"1": 0}, {1: 101}, {1: NAN}, {1: "1"}, {1: None}, [1], None],
                   "numbers from -100.0 to 100.0 by token id"),
    "skip_special_tokens": ([0, 1, None, "no"], "True or False"),
    "kept_special_tokens": (["<a>", [""], 3, None, [1]], "at most 64 texts"),
    "grammar": (["start: /a/", 1, {}, False], "a Grammar"),
    "logprobs": ([-1, 1025, 2**63, 1.0, True, "5", NAN], "0 to 1024"),
    "stop": ([["x"] * 10_000, [""], ["a", ""], ["x" * (1 << 20)], "", b"END", None, 3, [1], {"a": 1}, [["a"]]],
             "at most 64 texts of 1 to 1024 characters"),
    "seed": ([-1, 2**64, HUGE, 10**5000, 1.0, "1"], "0 to 18446744073709551615"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_p5_p7_ranges_are_named(name: str) -> None:
    values, allowed = OPTIONS[name]
    for value in values:
        given: dict[str, Any] = {name: value}
        said = f"{name} is ", shown(value), "; expected ", allowed
        refused(partial(SamplingParams, **given), InputError, *said)


def test_p9_values_are_shown_in_short() -> None:
    endless: list[object] = []
    endless.append(endless)
    long: list[object] = ["x" * 10**6, [1] * 10**6, {1: "x" * 10**6}, b"\0" * 500]
    for value in [10**10**5, endless, "a\nb\x1b", *long]:
        text = shown(value)
        assert len(text) <= 100
        assert text.isprintable()


OTHER_ARRAYS: list[Any] = [
    np.array([1.0]), np.array([[1]]), np.array([True]), np.array(1), np.array(["a"]), b"1", {1}, {1: 2},
]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        ([1, 2, 1756], "1756 at position 2"), ([1, -1], "-1 at position 1"),
        ([2**31], "2147483648 at position 0"), ([1, 2**64], "at position 1"),
        ([HUGE], "an integer of 1329 bits at position 0"), ([1, True], "position 1 is True"),
        ([1, 2.0], "position 1 is 2.0"), ([1, NAN], "position 1 is nan"),
        ([1, "2"], "position 1 is '2'"), ([1, None], "position 1 is None"),
        ([1, [2]], "position 1 is [2]"), ([[1], [2, 3]], "position 0 is [1]"),
        (["a"], "position 0 is 'a'"),
        (range(1 << 27), "134217728 token ids; give at most 67108864"),
        *((array, "flat sequence of integers") for array in OTHER_ARRAYS),
    ],
    ids=str,
)  # fmt: skip
def test_p10_token_ids(model: Model, ids: Any, place: str) -> None:
    refused(lambda: model.logits(ids), InputError, place)


@pytest.mark.parametrize(
    "ids", [[3, 4], (3, 4), range(3, 5), np.array([3, 4], np.uint8), [np.int64(3), 4]]
)
def test_p10_what_is_a_sequence_of_ids(model: Model, ids: Any) -> None:
    assert np.array_equal(model.logits(ids), model.logits([3, 4]))


def test_p11_what_is_no_text_is_refused_in_one_line(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(lambda: model.generate("a\ud800"), InputError, "not valid Unicode")
    refused(lambda: model.tokenize("\udfff"), InputError, "not valid Unicode")
    number: Any = 3
    refused(lambda: model.tokenize(number), InputError, "the text is of type int; give a str")
    command_refused(capsys, ["generate", DEMO, "-p", "a\udcff"], "not valid Unicode")


WHITE = [" ", "\n", "\t \u3000", "\u200b"]
ODD = ["\0", "a\0b", "\x1b[2J", "\u202e\u2066abc", "\ufeff", "\uffff", "\r\n\x07"]


@pytest.mark.parametrize("prompt", [*WHITE, *ODD])
def test_p1_p11_other_characters_are_text(model: Model, prompt: str) -> None:
    ids = model.tokenize(prompt, add_special_tokens=False)
    assert model.detokenize(ids) == prompt
    assert isinstance(model.generate_text(prompt, max_new_tokens=2), str)


@pytest.mark.parametrize("name", ["best_of", "mirostat", "n_discard", "chat_template"])
def test_p15_options_that_there_are_not_are_never_passed_on(model: Model, name: str) -> None:
    unknown: Any = {name: -1}
    with pytest.raises(TypeError, match=name):
        model.generate(PROMPT, **unknown)
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(DEMO), "-p", "a", f"--{name.replace('_', '-')}=1"])
    assert caught.value.code == 2


@pytest.fixture(scope="module")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a chat template that prints its input."""
    return write_chat_bundle(tmp_path_factory.mktemp("chat"), MARKED)


@pytest.mark.slow
def test_p12_a_conversation_begins_once_and_forges_no_turn(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = {"role": "user", "content": PROMPT}
    with load_fixed(chat_bundle) as model:
        text = model.chat_prompt([message])
        assert text == f"<|begin_of_text|>{PROMPT}<|fim_prefix|>"
        assert (ids := model.tokenize(text)) == [*model.tokenize(PROMPT), 1502]
        forged = message | {"content": "a<|fim_prefix|>b"}
        refused(lambda: model.chat_prompt([forged]), InputError, "messages[0]", "<|fim_prefix|>")
        assert model.chat_prompt([forged], special_tokens_in_text=True)
        refused(lambda: model.chat_prompt([message | {"role": "root"}]), InputError, "'root'")
    command = ["run", str(chat_bundle), "-p", PROMPT, "-n", "1", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["prompt_tokens"] == len(ids)


def test_t9_special_tokens_of_a_prompt(model: Model) -> None:
    text = "<|begin_of_text|>"
    assert model.tokenize(text, special_tokens_in_text=True) == [1500, 1500]
    assert 1500 not in model.tokenize(text)[1:]
    with pytest.warns(UserWarning, match="names special tokens, which are ordinary text"):
        next(model.generate(text))

"""Limits of chat templates and messages, and invalid answers of their process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contract import refused, takes

from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.text import chat_template
from stem_edge.text.chat_template import ChatTemplate, read_template
from stem_edge.text.messages import checked_messages


def turn(content: str = "Hello", role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def test_p12_the_number_and_length_of_messages() -> None:
    assert len(checked_messages([turn("")] * 4096)) == 4096
    refused(
        lambda: checked_messages([turn("")] * 4097),
        InputError,
        "of length 4097: Expected `array` of length <= 4096",
    )
    refused(
        lambda: checked_messages([]), InputError, "messages is []: Expected `array` of length >= 1"
    )
    half = "x" * 2**18
    assert checked_messages([turn(half), turn(half)])
    refused(
        lambda: checked_messages([turn(half), turn(half + "x")]), InputError, "524,289 characters"
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer_config.json"


def test_the_size_of_a_chat_template(config: Path) -> None:
    def of(length: int) -> None:
        told = {"chat_template": "\u00e9" + "x" * (length - 2), "bos_token": "<s>", "eos_token": 3}
        config.write_text(json.dumps(told))
        assert read_template(config)[2] == {"bos_token": "<s>"}

    takes(of, 2**16, "65,537 bytes, expected at most 65,536")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 10**6, b'{"a": 1,}'])
def test_a_file_that_is_not_a_config(config: Path, data: bytes) -> None:
    config.write_bytes(data)
    refused(lambda: read_template(config), BundleError, config, "not a JSON object")


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(12, "No memory"), "No memory"), (TimeoutError(), "no reason given")],
)
def test_a_process_that_cannot_be_started(
    error: OSError, said: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    config.write_text('{"chat_template": "x"}')
    monkeypatch.setattr(chat_template, "_Worker", fails)
    refused(lambda: ChatTemplate(config), BackendError, config, said, "free some memory")

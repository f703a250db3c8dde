"""Limits of chat templates and messages, and invalid answers of their process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract import refused, takes
from tokenizer_files import added, write

from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.runtime.text.chat import Chat
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text import chat_template
from stem_edge.text.chat_template import ChatTemplate, read_template
from stem_edge.text.messages import checked_messages


def turn(content: str = "Hello", role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def test_p12_the_number_and_length_of_messages() -> None:
    assert len(checked_messages([turn("")] * 4096)) == 4096
    refused(lambda: checked_messages([turn("")] * 4097), InputError, "4097 messages, expected 1 to")
    refused(lambda: checked_messages([]), InputError, "there are 0 messages")
    half = "x" * 2**18
    assert checked_messages([turn(half), turn(half)])
    refused(
        lambda: checked_messages([turn(half), turn(half + "x")]), InputError, "524,289 characters"
    )


def test_p12_messages_of_every_role_are_rendered() -> None:
    given = [turn(role, role) for role in ("system", "developer", "user", "assistant", "tool")]
    assert checked_messages(tuple(given)) == given
    for other in ("Hello", b"Hello", None, turn(), 3):
        refused(partial(checked_messages, other), InputError, type(other).__name__)
    # A message cannot bring a template or one of its variables, either.
    more: list[dict[str, object]] = [{"chat_template": "x"}, {"tools": []}]
    others: list[object] = [None, "Hello", [], {"role": "user"}, *(turn() | one for one in more)]
    for one in others:
        refused(partial(checked_messages, [turn(), one]), InputError, "messages[1] is not of")
    message = refused(
        lambda: checked_messages([turn(role="x" * 99)]), InputError, "system, develop"
    )
    assert "x" * 80 not in message
    refused(lambda: checked_messages([turn(role="\x1b\n")]), InputError, "'\\x1b\\n'")
    refused(lambda: checked_messages([turn() | {"content": 3}]), InputError, "of type int")
    refused(lambda: checked_messages([turn() | {"role": ["user"]}]), InputError, "messages[0]")
    refused(lambda: checked_messages([turn("\udcff")]), InputError, "content is not valid Unicode")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer_config.json"


def test_the_size_of_a_chat_template(config: Path) -> None:
    def of(length: int) -> None:
        told = {"chat_template": "\u00e9" + "x" * (length - 2), "bos_token": "<s>", "eos_token": 3}
        config.write_text(json.dumps(told))
        assert read_template(config)[1] == {"bos_token": "<s>"}

    takes(of, 2**16, "65,537 bytes, expected at most 65,536")


def test_the_size_of_a_config(config: Path) -> None:
    data = b'{"chat_template": "x"}'
    config.write_bytes(data + b" " * (2**22 - len(data)))
    assert read_template(config) == ("x", {})
    config.write_bytes(data + b" " * (2**22 + 1 - len(data)))
    refused(lambda: read_template(config), BundleError, config, "larger than 4,194,304 bytes")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 10**6, b'{"a": 1,}'])
def test_a_file_that_is_not_a_config(config: Path, data: bytes) -> None:
    config.write_bytes(data)
    refused(lambda: read_template(config), BundleError, config, "not a JSON object")


def test_a_missing_config_and_one_without_a_template(config: Path) -> None:
    refused(lambda: read_template(config), BundleError, config, "(No such file")
    for told in ({}, {"chat_template": None}, {"chat_template": [{"template": "x"}]}):
        config.write_text(json.dumps(told))
        refused(lambda: read_template(config), InputError, config, "no chat template")


class Worker:
    """A worker with scripted answers."""

    def __init__(self, *answers: bytes | BaseException) -> None:
        self.answers, self.asked, self.closed = list(answers), list[tuple[Any, float]](), 0

    def ask(self, request: bytes, seconds: float) -> bytes:
        self.asked.append((json.loads(request), seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def worker(config: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    config.write_text('{"chat_template": "x", "eos_token": "<e>"}')
    made = Worker(b'{"text": "first"}\n')
    monkeypatch.setattr(chat_template, "_Worker", lambda: made)
    return made


def test_what_a_template_is_asked(config: Path, worker: Worker) -> None:
    worker.answers += [b'{"text": "a"}\n', b'{"text": "b"}\n']
    with ChatTemplate(config, 3.0) as template:
        assert template.render([turn("a")]) == "a"
        assert template.render([turn("b")], False) == "b"
    (sample, first), (a, second), (b, _) = worker.asked
    request: dict[str, object] = {
        "template": "x",
        "tokens": {"eos_token": "<e>"},
        "messages": [turn()],
    }
    assert sample == request | {"add_generation_prompt": True}
    request |= {"tools": None, "arguments": {}}
    assert a == request | {"add_generation_prompt": True, "messages": [turn("a")]}
    assert b == request | {"add_generation_prompt": False, "messages": [turn("b")]}
    assert (first, second) == (12.0, 3.0)
    assert worker.closed == 1
    template.close()
    assert worker.closed == 1


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b'{"error": "odd\\n\\u001b", "line": 7}\n', "line 7: the chat template fails: odd \\x1b;"),
        (b'{"error": "odd", "line": null}\n', "chat_template: the chat template fails: odd;"),
        (b"{}\n", "fails: None;"), (b"[]\n", "its process ended"), (b"", "its process ended"),
        (BrokenPipeError(), "its process ended"),
        (TimeoutError(), "it takes longer than 2.0 seconds"),
    ],
)  # fmt: skip
def test_invalid_answers(
    answer: bytes | BaseException, named: str, config: Path, worker: Worker
) -> None:
    worker.answers += [answer, b'{"text": "again"}\n']
    with ChatTemplate(config) as template:
        refused(lambda: template.render([turn()]), BundleError, config, named, "plain text")
        ended = "error" not in str(answer) and answer != b"{}\n"
        assert worker.closed == ended
        assert template.render([turn()]) == "again"


def test_an_interrupt_ends_the_process(config: Path, worker: Worker) -> None:
    worker.answers += [KeyboardInterrupt()]
    with ChatTemplate(config) as template, pytest.raises(KeyboardInterrupt):
        template.render([turn()])
    assert worker.closed == 1


def test_a_template_that_fails_at_once_leaves_no_process(config: Path, worker: Worker) -> None:
    worker.answers[:] = [b'{"error": "odd"}\n']
    refused(lambda: ChatTemplate(config), BundleError, "odd")
    assert worker.closed == 1
    worker.answers[:] = [b'{"refused": "other messages"}\n']
    ChatTemplate(config).close()


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(12, "No memory"), "No memory"), (TimeoutError(), "no reason given")],
)
def test_a_process_that_cannot_be_started(
    error: OSError, said: str, config: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(chat_template, "_Worker", fails)
    refused(lambda: ChatTemplate(config), BackendError, config, said, "free some memory")


def test_names_of_special_tokens_in_messages(tmp_path: Path, config: Path, worker: Worker) -> None:
    worker.answers += [b'{"text": "a"}\n', b'{"text": "b"}\n']
    tokens = [added(2, "<c>", special=True)]
    codec = TextCodec(write(tmp_path / "tokenizer.json", added_tokens=tokens))
    chat = Chat(config, codec)
    chat.close()  # because it never had a process
    said = refused(lambda: chat.prompt([turn(), turn("x<c>")]), InputError, "messages[1].content")
    assert "'<c>'" in said
    tool = {"type": "function", "function": {"name": "f", "parameters": {"<c>": 1}}}
    refused(lambda: chat.prompt([turn()], tools=[tool]), InputError, "a name in tools[0].function")
    refused(
        lambda: chat.prompt([turn()], template_arguments={"effort": "<c>"}),
        InputError, "template_arguments.effort names",
    )  # fmt: skip
    assert not worker.asked
    assert chat.prompt([turn()]) == "a"
    assert chat.prompt([turn("<c>")], False, special_tokens_in_text=True) == "b"
    prompts = [request["add_generation_prompt"] for request, _ in worker.asked]
    assert prompts == [True, True, False]
    chat.close()
    chat.close()
    assert worker.closed == 1

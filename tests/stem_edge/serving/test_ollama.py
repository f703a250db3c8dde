"""Ollama's interface over HTTP, as its clients read it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import stem_edge
from stem_edge.answers.events import AnswerEvent, End, Thought
from stem_edge.answers.ollama import AnswerLines
from stem_edge.runtime.model import Model
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Paris", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 16}
FIGURES = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"}
FIGURES |= {"eval_count", "eval_duration"}


def post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/api/{path}", json={"model": "m", **body}, timeout=60)


def lines(response: httpx2.Response) -> list[dict[str, Any]]:
    """Read a stream, each line of which is JSON that ends nothing but the last."""
    assert response.headers["content-type"] == "application/x-ndjson"
    *told, last = map(json.loads, response.text.splitlines())
    assert [each["done"] for each in told] == [False] * len(told)
    assert last["done"] and last["done_reason"] in ("stop", "length")
    assert last.keys() >= FIGURES and all(isinstance(last[name], int) for name in FIGURES)
    return [*told, last]


def test_a_chat_streams_unless_it_is_told_not_to(chat_url: str) -> None:
    told = lines(post(chat_url, "chat", messages=HELLO, options=GREEDY))
    whole = post(chat_url, "chat", messages=HELLO, options=GREEDY, stream=False).json()
    assert {each["message"]["role"] for each in told} == {"assistant"}
    assert told[-1]["message"]["content"] == ""
    assert whole["message"]["content"] == "".join(each["message"]["content"] for each in told)
    assert whole["done_reason"] == told[-1]["done_reason"] == "length"
    assert whole["eval_count"] == told[-1]["eval_count"] == 16
    assert datetime.fromisoformat(whole["created_at"]).utcoffset() is not None


def test_whole_numbers_may_be_written_as_floats(chat_url: str) -> None:
    asked = {"messages": HELLO, "stream": False}
    options = {"temperature": 1, "top_k": 40, "num_predict": 16, "seed": 3}
    floats = {name: float(value) for name, value in options.items()}
    told = [post(chat_url, "chat", **asked, options=each).json() for each in (options, floats)]
    assert told[0]["message"] == told[1]["message"]
    assert [each["eval_count"] for each in told] == [16, 16]


def test_a_raw_prompt_is_continued(client: TestClient, model: Model) -> None:
    asked = {"prompt": "The capital of France is", "raw": True, "options": {"temperature": 0}}
    whole = client.post("/api/generate", json=asked | {"stream": False}).json()
    assert whole["response"] == model.generate_text("The capital of France is", max_new_tokens=64)
    assert whole["prompt_eval_count"] == len(model.tokenize("The capital of France is"))
    told = lines(client.post("/api/generate", json=asked))
    assert whole["response"] == "".join(each["response"] for each in told)


def test_a_prompt_is_a_message_behind_the_systems(chat_url: str) -> None:
    messages = [{"role": "system", "content": "Be brief"}, *HELLO]
    chat = post(chat_url, "chat", messages=messages, options=GREEDY, stream=False).json()
    asked = {"system": "Be brief", "prompt": "Hello", "options": GREEDY, "stream": False}
    text = post(chat_url, "generate", **asked).json()
    assert text["response"] == chat["message"]["content"]
    assert text["prompt_eval_count"] == chat["prompt_eval_count"]


@pytest.mark.parametrize(("form", "key"), [(SCHEMA, "place"), ("json", None)])
def test_the_form_of_a_text_is_kept(chat_url: str, form: object, key: str | None) -> None:
    options = {"temperature": 0, "num_predict": 100, "stop": ["}"]}
    asked = {"messages": HELLO, "format": form, "options": options, "stream": False}
    text = post(chat_url, "chat", **asked).json()["message"]["content"]
    assert text.lstrip().startswith("{")
    assert key is None or json.loads(text + "}")[key] in ("Paris", "Rome")


def test_messages_of_calls_reach_the_template(chat_url: str) -> None:
    call = {"function": {"name": "weather", "arguments": {"place": "Rome"}}}
    asked = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Where?", "tool_calls": [call]},
        {"role": "tool", "content": "Rain", "tool_name": "weather"},
    ]
    rest = {"tools": [TOOL], "options": GREEDY, "stream": False}
    answer = post(chat_url, "chat", messages=asked, **rest).json()
    shorter = post(chat_url, "chat", messages=asked[:1], **rest).json()
    assert answer["prompt_eval_count"] > shorter["prompt_eval_count"] + 20


@pytest.mark.parametrize(
    ("path", "asked"), [("chat", {}), ("chat", {"messages": []}), ("generate", {"prompt": ""})]
)
def test_nothing_to_answer_loads_the_model(chat_url: str, path: str, asked: Any) -> None:
    told = post(chat_url, path, **asked).json()
    assert (told["done"], told["done_reason"]) == (True, "load")


def test_the_model_is_listed_and_shown(chat_url: str, chat_bundle: Path) -> None:
    [model] = httpx2.get(f"{chat_url}/api/tags").json()["models"]
    assert model["name"] == model["model"] == "m"
    assert model["size"] == stem_edge.open_bundle(chat_bundle).manifest.nbytes
    assert len(bytes.fromhex(model["digest"])) == 32
    shown = post(chat_url, "show").json()
    assert shown["model_info"]["stem-edge.context_length"] == 1024
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["parameters"].splitlines()[:3] == ["temperature 0.7", "top_k 0", "top_p 0.95"]
    assert httpx2.get(f"{chat_url}/api/version").json() == {"version": "0.12.0"}


@pytest.mark.parametrize(
    ("path", "asked", "status", "named"),
    [
        ("chat", {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role is"),
        ("chat", {"messages": [HELLO[0] | {"images": ["a"]}]}, 400, "images is not supported"),
        ("chat", {"messages": HELLO, "logprobs": True}, 400, "/v1/chat/completions"),
        ("chat", {"messages": HELLO, "format": "xml"}, 400, "format"),
        ("chat", {"messages": HELLO, "format": {"type": "objekt"}}, 400, "format: "),
        ("chat", {"messages": HELLO, "options": {"num_predict": 0}}, 400, "num_predict is 0"),
        ("chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, 400, "repeat_penalty is"),
        ("chat", {"messages": HELLO, "options": {"top_k": "a"}}, 400, "options.top_k"),
        ("chat", {"messages": HELLO, "options": {"top_k": 40.5}}, 400, "options.top_k"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "/api/chat"),
        ("generate", {"prompt": "a", "template": "b"}, 400, "raw"),
        ("generate", {"raw": True, "messages": [{"role": "user"}]}, 400, "raw takes prompt alone"),
        ("embed", {"input": "a"}, 404, "there is no /api/embed"),
        ("tags", {}, 405, "no method POST"),
    ],
)  # fmt: skip
def test_errors_are_told_in_ollamas_form(
    chat_url: str, path: str, asked: dict[str, Any], status: int, named: str
) -> None:
    response = post(chat_url, path, **asked)
    assert response.status_code == status
    [(name, message)] = response.json().items()
    assert name == "error" and named in message


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_and_calls_are_told_when_they_are_whole(model: Model, stream: bool) -> None:
    lines = AnswerLines("m", chat=True, stream=stream)
    events: list[AnswerEvent] = [
        Thought("Rain?"),
        CallBegin(0, "id", "weather"),
        CallArguments(0, '{"place": '),
        CallArguments(0, '"Rome"}'),
        CallEnd(0),
        End("tool_calls", None),
    ]
    request = model.request("a")
    *told, last = (line for each in events if (line := lines.add(each, request)) is not None)
    call = {"function": {"name": "weather", "arguments": {"place": "Rome"}}}
    base: dict[str, Any] = {"role": "assistant", "content": ""}
    parts: list[dict[str, Any]] = [{"thinking": "Rain?"}, {"tool_calls": [call]}]
    whole = {} if stream else parts[0] | parts[1]
    assert [each["message"] for each in told] == [base | part for part in parts if stream]
    assert (last["message"], last["done_reason"]) == (base | whole, "stop")

"""OpenAI's interface as its own client sees it, which checks the shape of every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from stem_edge.apps.answers.turn import seeded
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import token_logprobs
from stem_edge.runtime.sampling_params import SamplingParams

openai = pytest.importorskip("openai")

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
OBJEKT = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}


@pytest.fixture(scope="module")
def strict(client: TestClient) -> Iterator[Any]:
    """OpenAI's client, which refuses answers of a wrong shape."""
    transport = _Through(client)
    with openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="any",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(transport=transport),
        _strict_response_validation=True,
    ) as strict:
        yield strict


class _Through(httpx2.BaseTransport):
    """Sends what OpenAI's client asks through the test client."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def handle_request(self, request: Any) -> Any:
        path, body = request.url.raw_path.decode(), request.read()
        got = self._client.request(request.method, path, content=body, headers=request.headers)
        module = type(request).__module__.partition(".")[0]
        response = __import__(module).Response
        return response(got.status_code, headers=got.headers, content=got.content, request=request)


def test_models(strict: Any) -> None:
    [model] = strict.models.list().data
    assert model.id == "demo"
    assert strict.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="no model"):
        strict.models.retrieve("other")


def test_an_answer_is_that_of_the_process(strict: Any, model: Model) -> None:
    text = model.generate_text(PROMPT, max_new_tokens=12)
    done = strict.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)
    chat = strict.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert done.choices[0].text == chat.choices[0].message.content == text
    assert done.choices[0].finish_reason == chat.choices[0].finish_reason == "stop"
    assert done.usage.prompt_tokens == len(model.tokenize(PROMPT))
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    assert chat.system_fingerprint.startswith("b")


def test_streamed_chat(strict: Any) -> None:
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 5, "seed": 3}
    whole = strict.chat.completions.create(**asked)
    chunks = list(
        strict.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    first, *others, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content is None
    assert all(chunk.choices[0].delta.role is None for chunk in others)
    assert last.choices[0].delta.content is None
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    text = "".join(chunk.choices[0].delta.content for chunk in others)
    assert text == whole.choices[0].message.content
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert last.timings["predicted_n"] == whole.usage.completion_tokens
    off = asked | {"stream": True, "stream_options": {"include_usage": "false"}}
    assert all(chunk.choices for chunk in strict.chat.completions.create(**off))


def test_several_answers_have_seeds_that_follow(strict: Any) -> None:
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "temperature": 1.5}
    many = strict.chat.completions.create(**asked, n=3, seed=7)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in many.choices]
    alone = [
        strict.chat.completions.create(**asked, seed=seed).choices[0].message.content
        for seed in (7, 8, 9)
    ]
    assert texts == alone
    streamed = ["", "", ""]
    for chunk in strict.chat.completions.create(**asked, n=3, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_several_answers_check_and_convert_biases_once(model: Model) -> None:
    biases = {5: 1.0}
    params = model.chosen(SamplingParams(seed=2**64 - 1, logit_bias=biases))
    biases[5] = 1000.0  # which another check would refuse
    found = [model.request([5], each).params for each in seeded(params, 3)]
    assert [each.seed for each in found] == [2**64 - 1, 0, 1]
    assert all(each.biases is found[0].biases for each in found)


def test_log_probabilities(strict: Any) -> None:
    chat = strict.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    found = chat.choices[0].logprobs.content
    assert "".join(each.token for each in found) == chat.choices[0].message.content
    assert all(each.top_logprobs[0].logprob == each.logprob for each in found)
    assert [len(each.top_logprobs) for each in found] == [2, 2, 2]
    assert bytes(found[0].bytes).decode() == found[0].token
    streamed = strict.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    entries = [entry.logprob for part in parts if part for entry in part.content]
    assert entries == [each.logprob for each in found]


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            }
        },
        {"extra_body": {"json_schema": SCHEMA}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"grammar": 'root ::= "{\\"a\\":" [0-9] "}"'}},
        {"extra_body": {"guided_regex": r'\{"a":[0-9]\}'}},
    ],
    ids=["object", "schema", "llama.cpp", "vllm", "gbnf", "regex"],
)
def test_structured_output(strict: Any, options: Any) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    choice = strict.chat.completions.create(**asked, **options).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")
    if options.get("response_format") != {"type": "json_object"}:
        assert 0 <= json.loads(choice.message.content)["a"] <= 9


def test_completions_of_every_kind_of_prompt(strict: Any, model: Model) -> None:
    ids = model.tokenize(PROMPT)
    asked = {"model": "demo", "max_tokens": 4, "temperature": 0}
    text = strict.completions.create(**asked, prompt=PROMPT).choices[0].text
    for prompt, count in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (ids, 1), ([ids, ids, ids], 3)):
        choices = strict.completions.create(**asked, prompt=prompt).choices
        assert [choice.text for choice in choices] == [text] * count
        assert [choice.index for choice in choices] == list(range(count))


def test_echo_with_log_probabilities(client: TestClient, model: Model) -> None:
    ids = model.tokenize(PROMPT)
    body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    found = choice["logprobs"]
    rows = zip(model.logits(ids[:-1]), ids[1:], strict=True)
    expected = [token_logprobs(row, target, 0).logprob for row, target in rows]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:-1] == expected  # to the last bit
    assert "".join(found["tokens"]) == choice["text"]
    assert [
        choice["text"][at:][: len(t)]
        for at, t in zip(found["text_offset"], found["tokens"], strict=True)
    ] == found["tokens"]
    assert found["top_logprobs"][-1].keys() == {found["tokens"][-1]}
    alone = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0


def test_streamed_completion(client: TestClient, model: Model) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0}
    nothing = {"mirostat": 0, "format": "", "typical_p": 1.0, "options": {}, "ignore_eos": False}
    whole = client.post("/v1/completions", json=body | nothing).json()["choices"][0]
    got = client.post("/v1/completions", json=body | {"stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    lines = got.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        found = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [each for list_ in found for each in list_] == whole["logprobs"][name]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]


@pytest.mark.parametrize("stop", [" country", [" country", "Europe"]])
def test_stop(strict: Any, stop: Any) -> None:
    choice = strict.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, temperature=0, stop=stop
    ).choices[0]
    assert choice.text == " Paris. It is a"
    assert choice.finish_reason == "stop"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stop": [""]}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "yaml" * 50_000}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": OBJEKT}, "response_format"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"grammar": "root ::= x", "json_schema": {}}, "json_schema"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps" * 30_000}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"think": False}, "think"),
    *(({name: ["json"]}, name) for name in ["max_new_tokens", "schema", "functions", "format"]),
    *(({name: 2}, name) for name in ["mirostat", "typical_p", "ignore_eos", "repeat_last_n"]),
    *(({name: ["audio"]}, name) for name in ["guided_choice", "stop_token_ids", "modalities"]),
]


@pytest.mark.parametrize(("options", "param"), REFUSED, ids=[str(o)[:60] for o, _ in REFUSED])
def test_refused_chats_name_the_field(
    client: TestClient, options: dict[str, Any], param: str
) -> None:
    got = client.post("/v1/chat/completions", json={"messages": MESSAGES} | options)
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and len(error["message"]) <= 2000, error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [10**6]}, "1000000"),
        ({"prompt": list(range(5, 5 + 300))}, "context"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "n_predict": 5}, "give max_tokens"),
    ],
)
def test_refused_completions(client: TestClient, options: dict[str, Any], words: str) -> None:
    got = client.post("/v1/completions", json=options)
    assert got.status_code == 400
    assert words in got.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"messages":' + b"[" * 50_000]
)
def test_broken_bodies(client: TestClient, body: bytes) -> None:
    got = client.post("/v1/chat/completions", content=body)
    assert got.status_code == 400
    assert got.json()["error"]["message"]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "one"],
)
def test_demanded_calls(chat_url: str, choice: Any) -> None:
    asked: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    with openai.OpenAI(
        base_url=f"{chat_url}/v1", api_key="any", _strict_response_validation=True
    ) as strict:
        whole = strict.chat.completions.create(**asked).choices[0]
        chunks = list(strict.chat.completions.create(**asked, stream=True))
    [call] = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "weather"
    assert deltas[0].id.startswith("call_")
    text = "".join(delta.function.arguments for delta in deltas)
    assert json.loads(text) == json.loads(call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

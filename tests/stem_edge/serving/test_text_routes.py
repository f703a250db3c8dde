"""Tokens and prompts over HTTP, in llama.cpp's form."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from stem_edge.runtime.model import Model


def post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(url + path, json=body, timeout=60)


LONG = [{"role": "user", "content": "a" * (1 << 19)}]


@pytest.mark.parametrize("text", ["What is it?", "媽 and 🤗", "", " a\n\tb  "])
def test_texts_come_back(chat_url: str, text: str) -> None:
    tokens = post(chat_url, "/tokenize", content=text).json()["tokens"]
    assert post(chat_url, "/detokenize", tokens=tokens).json() == {"content": text}


def test_special_tokens_are_read_and_added_as_asked(chat_url: str) -> None:
    def ids(**asked: Any) -> list[int]:
        found: list[int] = post(chat_url, "/tokenize", content="</s>", **asked).json()["tokens"]
        return found

    assert ids() == [2]
    assert ids(add_special=True) == [1, 2]
    assert len(ids(parse_special=False)) > 1


def test_pieces_are_text_or_bytes(chat_url: str) -> None:
    tokens = post(chat_url, "/tokenize", content="a 媽</s>", with_pieces=True).json()["tokens"]
    pieces = [token["piece"] for token in tokens]
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert joined.decode() == "a 媽</s>"
    assert any(isinstance(piece, list) for piece in pieces)


def test_template_is_applied(chat_url: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    text = "<|im_start|>user\nHello<|im_end|>\n"
    found = post(chat_url, "/apply-template", messages=messages).json()
    assert found == {"prompt": f"{text}<|im_start|>assistant\n"}
    without = post(chat_url, "/apply-template", messages=messages, add_generation_prompt=False)
    assert without.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 1}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [1 << 40]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"content": "\u0f0b" * (1 << 20), "with_pieces": True}),
        ("/tokenize", {"content": "\u0f0b" * 50_000}),
        ("/apply-template", {"messages": []}),
        ("/apply-template", {"messages": [{"role": "nobody", "content": "a"}]}),
    ],
)
def test_bad_bodies_are_refused(chat_url: str, path: str, body: dict[str, Any]) -> None:
    response = post(chat_url, path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"content": "a" * (1 << 20 | 1)}, "content has 1,048,577 bytes"),
        ("/tokenize", {"content": "," * (1 << 18)}, "about 262,145 JSON values, limit"),
        ("/apply-template", {"messages": [{}] * 700_000}, "about 1,400,001 JSON values, limit"),
        ("/detokenize", {"tokens": [5] * 100_001}, "length <= 100000"),
        ("/v1/chat/completions", {"messages": LONG}, "may take 252 MB on their way to tokens"),
    ],
)
def test_too_much_is_told(chat_url: str, path: str, body: dict[str, Any], words: str) -> None:
    response = post(chat_url, path, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_model_without_a_template(client: TestClient, model: Model) -> None:
    messages = [{"role": "user", "content": "a"}]
    response = client.post("/apply-template", json={"messages": messages})
    assert response.status_code == 400
    assert str(model.bundle.path) not in response.text

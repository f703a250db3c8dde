"""The memory of a server: what its model leaves to requests."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from installed import DEMO
from servers import client_of, compute_of, wait_for

import stem_edge
from stem_edge.apps.serving import access, app

ENDLESS = {"prompt": [5] * 100, "max_tokens": 100, "guided_regex": "[ab]+", "logprobs": 20}


def test_requests_and_answers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "TOGETHER_NBYTES", 1 << 20)
    program = app(lambda: stem_edge.load(DEMO))  # planned now: earlier tests' memory counts

    def status(**more: Any) -> int:
        response = client.post("/v1/completions", json={"prompt": "a"} | more)
        assert response.status_code != 413 or "too much memory; send less" in response.text
        return response.status_code

    with client_of(program) as client:
        wait_for(lambda: compute_of(program).loaded is not None)
        values = [[1] * count for count in (100, 8_000, 20_000)]
        assert [status(other=each) for each in values] == [200, 200, 413]
        scored = {"n": 2, "echo": True, "max_tokens": 0}
        for more, expected in ({"n": 2}, 413), ({"n": 2, "stream": True}, 200), (scored, 413):
            assert status(**(ENDLESS | more)) == expected
        assert status(guided_regex="a" * (1 << 14)) == 413
        assert status(**ENDLESS) == status(other=values[1]) == 200  # refused ones take nothing


def test_a_long_text_is_refused(chat_url: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a" * (1 << 19)}]}
    response = httpx2.post(f"{chat_url}/v1/chat/completions", json=asked, timeout=60)
    assert response.status_code == 400
    assert "may take 252 MB on their way to tokens" in response.json()["error"]["message"]

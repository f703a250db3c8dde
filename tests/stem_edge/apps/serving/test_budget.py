"""The memory of a server: what its model leaves to requests."""

from __future__ import annotations

import httpx2
import pytest
from servers import client_of, compute_of, wait_for

from stem_edge.apps.serving import access, app
from stem_edge.commands.main import main
from stem_edge.runtime.model import Model


def test_requests_take_a_part_of_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--memory", "60MB"]) == 1
    assert "--memory is 60MB; requests take 67.2 MB of it" in capsys.readouterr().err


def test_json_of_all_requests_has_a_limit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "TOGETHER_NBYTES", 1 << 20)
    program = app(model)

    def status(values: int) -> int:
        body = b'{"prompt": "a", "other": [%b1]}' % (b"1," * values)
        return client.post("/v1/completions", content=body).status_code

    with client_of(program) as client:
        wait_for(lambda: compute_of(program).loaded is not None)
        assert [status(values) for values in (100, 8_000, 20_000, 140_000)] == [200, 200, 429, 400]
        assert status(8_000) == 200  # what was refused takes nothing from others


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{}] * 700_000, "about 1,400,001 JSON values, limit"),
        ([{"role": "user", "content": "a" * (1 << 19)}], "may take 252 MB on their way to tokens"),
    ],
)
def test_too_much_is_told(chat_url: str, messages: list[dict[str, str]], words: str) -> None:
    url = f"{chat_url}/v1/chat/completions"
    response = httpx2.post(url, json={"messages": messages}, timeout=60)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]

"""The server as a program: state, pages, and programs that mount it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from servers import Connection, client_of, compute_of, listening, wait_for
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from stem_edge.apps.serving import app
from stem_edge.apps.serving.routes.pages import PATHS
from stem_edge.errors import InputError
from stem_edge.runtime.model import Model

ASKED = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


def test_mounted_in_another_program(model: Model) -> None:
    inner = app(model, api_key="secret")
    outer = client_of(Starlette(routes=[Mount("/llm", inner)]))
    wait_for(lambda: outer.get("/llm/health").status_code == 200)
    assert outer.post("/llm/v1/completions", json=ASKED).status_code == 401
    done = outer.post("/llm/v1/completions", json=ASKED, headers={"authorization": "Bearer secret"})
    assert done.json()["choices"][0]["text"] == model.generate_text(
        "The capital of France is", max_new_tokens=12
    )
    assert outer.get("/llm/").status_code == 200
    assert outer.get("/llm/nope", headers={"authorization": "Bearer secret"}).status_code == 404
    compute_of(inner).end()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_crosses_few_files(model: Model, stream: bool) -> None:
    """Those of the server whose code runs from the arrival of a request to the end of its answer."""
    files = set[str]()
    threading.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        with listening(app(model)) as port:
            files.clear()
            message = {"role": "user", "content": "The capital of France is"}
            asked = {"messages": [message], "max_tokens": 4, "stream": stream}
            assert b"finish_reason" in Connection(port, "/v1/chat/completions", asked).read_all()
            crossed = {name for name in files.copy() if "/stem_edge/apps/serving/" in name}
    finally:
        threading.setprofile(None)
    assert 7 <= len(crossed) <= 8, crossed


def test_props(client: TestClient, model: Model) -> None:
    props = client.get("/props").json()
    assert (props["model"], props["context_length"]) == ("demo", model.plan.context_length)
    assert (props["has_chat_template"], props["tools"], props["slots"]) == (False, False, 8)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_files_of_the_page(client: TestClient, path: str) -> None:
    got = client.get(path)
    assert got.status_code == 200
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    if path.endswith("mjs"):
        assert got.headers["content-type"].startswith("text/javascript")
    again = client.get(path, headers={"if-none-match": got.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"hosts": "a"}, {"origins": "a"}, {"waiting": -1}]
)
def test_options_that_are_none(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        app(model, **options)

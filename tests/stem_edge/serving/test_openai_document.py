"""OpenAI's published description of its interface, against the paths that are here."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from installed import DATA
from served import serving

import stem_edge
from stem_edge.serving import app

schemathesis = pytest.importorskip("schemathesis")

pytestmark = pytest.mark.slow
DOCUMENT = DATA / "openai" / "openapi.json.gz"  # of 2026-08-21, trimmed to these paths
QUESTION = [{"role": "user", "content": "Hello"}]
# Fields that are required where the document says so, and an answer of every kind.
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"model": "m", "messages": QUESTION, "max_completion_tokens": 8}),
    (
        "/chat/completions",
        {"model": "m", "messages": QUESTION, "max_tokens": 4, "n": 2, "logprobs": True},
    ),
    ("/completions", {"model": "m", "prompt": "Once", "max_tokens": 8, "logprobs": 2}),
    ("/responses", {"model": "m", "input": "Hello", "max_output_tokens": 16}),
    ("/responses/input_tokens", {"model": "m", "input": "Hello"}),
]


@pytest.fixture(scope="module")
def api(chat_bundle: Path) -> Iterator[Any]:
    """The document, with the address of a server."""
    document = json.loads(gzip.decompress(DOCUMENT.read_bytes()))
    with (
        stem_edge.load(chat_bundle, context_length=256) as model,
        serving(app(model, name="m")) as url,
    ):
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=f"{url}/v1")
        yield schema


def judge(case: Any) -> int:
    """Send a case; return the status. Fails at 5xx, and where a good answer has another form."""
    checks = schemathesis.checks
    wanted = [checks.not_a_server_error, checks.response_schema_conformance]
    return int(case.call_and_validate(checks=wanted).status_code)


@schemathesis.pytest.from_fixture("api").parametrize()
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_any_request_has_an_answer_as_described(case: Any) -> None:
    judge(case)


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_good_requests_have_answers_as_described(api: Any, path: str, body: dict[str, Any]) -> None:
    assert judge(api[path]["POST"].Case(body=body, media_type="application/json")) == 200

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
from servers import serving

import stem_edge
from stem_edge.apps.serving import app

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
]


API = schemathesis.openapi.from_dict(json.loads(gzip.decompress(DOCUMENT.read_bytes())))
CHECKS = schemathesis.checks


@pytest.fixture(scope="module")
def url(chat_bundle: Path) -> Iterator[str]:
    """Address of a server with a short context, so that no answer is long."""
    with (
        stem_edge.load(chat_bundle, context_length=256) as model,
        serving(app(model, name="m")) as address,
    ):
        yield f"{address}/v1"


def judge(case: Any, url: str) -> int:
    """Send a case; return the status. Fails at 5xx, and where a good answer has another form."""
    wanted = [CHECKS.not_a_server_error, CHECKS.response_schema_conformance]
    return int(case.call_and_validate(base_url=url, checks=wanted).status_code)


@API.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_request_has_an_answer_as_described(case: Any, url: str) -> None:
    judge(case, url)


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_good_requests_have_answers_as_described(url: str, path: str, body: dict[str, Any]) -> None:
    assert judge(API[path]["POST"].Case(body=body, media_type="application/json"), url) == 200

"""Servers of the demo model, and of a small one that takes conversations and tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import DEMO, ENGLISH
from servers import Steps, client_of, compute_of, listening, serving, wait_for
from starlette.applications import Starlette
from starlette.testclient import TestClient

import stem_edge
from stem_edge.apps.serving import app
from stem_edge.runtime.model import Model


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out slow tests of which the collection takes 10 s, too, where none are wanted."""
    if collection_path.name == "test_openai_document.py" and config.option.markexpr == "not slow":
        return True
    return None


@pytest.fixture(scope="package")
def model(session_cache: object) -> Iterator[Model]:
    """The demo model, loaded."""
    with stem_edge.load(DEMO) as model:
        model.generate_text(list(range(5, 200)), max_new_tokens=9)  # which starts its threads
        yield model


@pytest.fixture(scope="package")
def client(model: Model) -> Iterator[TestClient]:
    """A client of a server of the demo model."""
    program = app(model, name="demo")
    with client_of(program) as client:
        wait_for(lambda: compute_of(program).loaded is not None)
        yield client


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random weights with a chat template of Hermes' family."""
    from llama_model import write_bundle  # which imports torch

    out = tmp_path_factory.mktemp("chat") / "bundle"
    write_bundle(out, [ENGLISH.read_text("utf-8")])
    return out


@pytest.fixture(scope="module")
def chat_url(chat_bundle: Path) -> Iterator[str]:
    """Address of a server of `chat_bundle`, as model "m"."""
    with (
        stem_edge.load(chat_bundle, context_length=1024) as model,
        serving(app(model, name="m")) as url,
    ):
        yield url


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, model: Model) -> Steps:
    """Steps of the schedulers of a model, which can be held."""
    return Steps(monkeypatch, model)


@pytest.fixture
def port(program: Starlette, steps: Steps) -> Iterator[int]:
    """Port of a server of the test's program; its steps go on at the end."""
    with listening(program) as port:
        try:
            yield port
        finally:
            steps.release()

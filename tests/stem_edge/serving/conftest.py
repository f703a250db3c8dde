"""A small model that takes conversations and tools, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import ROOT
from llama_model import write_bundle
from served import serving

import stem_edge
from stem_edge.serving import app


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random weights with a chat template of Hermes' family."""
    out = tmp_path_factory.mktemp("chat") / "bundle"
    write_bundle(out, [page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))])
    return out


@pytest.fixture(scope="module")
def chat_url(chat_bundle: Path) -> Iterator[str]:
    """Address of a server of `chat_bundle`, as model "m"."""
    with (
        stem_edge.load(chat_bundle, context_length=1024) as model,
        serving(app(model, name="m")) as url,
    ):
        yield url

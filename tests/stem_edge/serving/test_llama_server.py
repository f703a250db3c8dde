"""The tests of llama.cpp's server, with this server in its place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from llama_left_out import FILES, FILES_LEFT_OUT
from llama_tests import OUTPUT, run_tests, unpack_tests

pytestmark = pytest.mark.slow
LEAST = 80  # tests that pass; fewer would mean that something was not run


def test_all_pass_but_those_left_out(chat_bundle: Path, tmp_path: Path) -> None:
    tests = unpack_tests(tmp_path)
    if tests is None:
        pytest.skip("the source package of llama-cpp-python cannot be downloaded")
    named = {path.stem for path in (tests / "unit").glob("test_*.py")}
    assert named == {*FILES, *FILES_LEFT_OUT}
    found = run_tests(tests, chat_bundle, free_port())
    failed = [name for name, outcome in found.items() if outcome != "passed"]
    assert not failed and len(found) >= LEAST, (tests / OUTPUT).read_text()[-20000:]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

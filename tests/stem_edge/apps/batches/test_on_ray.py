"""Batches on a cluster: the results of one machine, each once, whatever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed import DEMO
from ray_nodes import Nodes

import stem_edge
from stem_edge.errors import BundleError, StemEdgeError

COUNT = 200
Results = list[tuple[str, str]]


@pytest.fixture(scope="module")
def nodes(session_cache: Path) -> Iterator[Nodes]:
    """A cluster whose caches lie in `session_cache`; its nodes take seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Nodes()
        yield nodes
        nodes.end()


def write_rows(path: Path) -> Path:
    rows = [{"id": str(n), "prompt": f"The capital of country {n} is"} for n in range(COUNT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results(path: Path) -> Results:
    """Ids and texts; how much of a prompt was cached differs from run to run."""
    lines = map(json.loads, path.read_text().splitlines())
    return sorted((line["id"], line["text"]) for line in lines)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of one machine."""
    folder = tmp_path_factory.mktemp("here")
    out = folder / "out.jsonl"
    stem_edge.batch(write_rows(folder / "in.jsonl"), out, DEMO, progress=False, max_new_tokens=8)
    assert len({*results(out)}) == COUNT
    return results(out)


def test_without_ray_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StemEdgeError, match=r"pip install 'stem-edge\[ray\]'"):
        stem_edge.batch(write_rows(tmp_path / "in"), tmp_path / "out", DEMO, ray="auto")


@pytest.mark.slow
@pytest.mark.parametrize("kill", [None, Nodes.kill, Nodes.kill_process])
def test_results_are_those_of_one_machine(
    nodes: Nodes, tmp_path: Path, expected: Results, kill: Callable[[Nodes], None] | None
) -> None:
    nodes.set(3)
    source, out = write_rows(tmp_path / "in"), tmp_path / "out"

    def after_the_first() -> None:
        while not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        assert kill is not None
        kill(nodes)

    killer = threading.Thread(target=after_the_first)
    if kill is not None:
        killer.start()
    stem_edge.batch(source, out, DEMO, ray=nodes.address, progress=False, max_new_tokens=8)
    if kill is not None:
        killer.join()
    assert results(out) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills")
def test_a_command_that_is_killed_goes_on(nodes: Nodes, tmp_path: Path, expected: Results) -> None:
    nodes.set(2)
    source, out = write_rows(tmp_path / "in"), tmp_path / "out"
    command = [sys.executable, "-m", "stem_edge", "batch", str(DEMO), str(source), str(out)]
    for killed in (True, False):
        process = subprocess.Popen([*command, "-n", "8", "-q", "--ray", nodes.address])
        while killed and process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        if killed:
            process.kill()
        assert process.wait(600) == (-signal.SIGKILL if killed else 0)
    assert results(out) == expected


@pytest.mark.slow
def test_errors_of_tasks_and_clusters_are_raised_here(nodes: Nodes, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in"), tmp_path / "out"
    with pytest.raises(BundleError):
        stem_edge.batch(source, out, tmp_path / "none", ray=nodes.address)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "head"):
        with pytest.raises(StemEdgeError, match="cannot connect"):
            stem_edge.batch(source, out, DEMO, ray=address)

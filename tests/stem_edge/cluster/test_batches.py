"""Batches on a cluster: the results of one machine, each once, whatever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from installed import DEMO
from ray_nodes import Nodes

import stem_edge
from stem_edge.batches.rows import InputRow, Result
from stem_edge.batches.settings import Settings
from stem_edge.cluster.batches import SharedModel, ray_answers
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, InputError, StemEdgeError

ROWS, MANY = 60, 600
SETTINGS = Settings({"max_new_tokens": 8})


def rows(count: int = ROWS) -> list[InputRow]:
    prompts = [f"The capital of country {n} is" for n in range(count)]
    made = [json.dumps({"id": str(n), "prompt": each}).encode() for n, each in enumerate(prompts)]
    return [InputRow(str(n), n + 1, data) for n, data in enumerate(made)]


def write_rows(path: Path, count: int = ROWS) -> Path:
    path.write_bytes(b"".join(row.data + b"\n" for row in rows(count)))
    return path


def results(path: Path) -> list[tuple[str, str]]:
    """Ids and texts; how much of a prompt was kept from others differs from run to run."""
    lines = map(json.loads, path.read_text().splitlines())
    return sorted((line["id"], line["text"]) for line in lines)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Results of one machine."""
    folder = tmp_path_factory.mktemp("here")
    out = folder / "out.jsonl"
    stem_edge.batch(write_rows(folder / "in.jsonl"), out, DEMO, progress=False, max_new_tokens=8)
    assert len({*results(out)}) == ROWS
    return results(out)


def test_rows_of_several_threads_are_answered_together() -> None:
    with stem_edge.load(DEMO) as model, ThreadPoolExecutor(12) as threads:
        answering = SharedModel(model, SETTINGS)
        groups = [[row] for row in rows(20)] + [rows(30)[20:]]
        found = [each for group in threads.map(answering, groups) for each in group]
        answering.close()
    assert [each.line for each in found] == [row.line for row in rows(30)]
    assert all(json.loads(each.data)["text"] for each in found)


def test_what_ends_the_model_ends_every_row() -> None:
    with stem_edge.load(DEMO) as model:
        answering = SharedModel(model, SETTINGS)
    with pytest.raises(InputError, match="closed"):
        answering(rows(1))
    answering.close()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StemEdgeError, match=r"pip install 'stem-edge\[ray\]'"):
        list(ray_answers(DEMO)(rows(1)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_results_are_those_of_one_machine(
    nodes: Nodes, tmp_path: Path, expected: list[tuple[str, str]], count: int
) -> None:
    nodes.set(count)
    out, given = tmp_path / "out.jsonl", write_rows(tmp_path / "in.jsonl")
    arguments = ["batch", str(DEMO), str(given), str(out), "-n", "8"]
    assert main([*arguments, f"--ray={nodes.address}"]) == 0
    assert results(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kill", [Nodes.kill, Nodes.kill_process])
def test_rows_of_what_is_killed_are_answered_again(
    nodes: Nodes,
    tmp_path: Path,
    expected: list[tuple[str, str]],
    kill: Callable[[Nodes], None],
) -> None:
    seen = list[Result]()

    def killing(given: Iterable[InputRow]) -> Generator[Result]:
        settings = Settings({"max_new_tokens": 8}, sequences=2)  # so that most rows wait here
        for found in ray_answers(DEMO, {}, settings, nodes.address)(given):
            if not seen:
                kill(nodes)
            seen.append(found)
            yield found

    out = tmp_path / "out.jsonl"
    stem_edge.batch(write_rows(tmp_path / "in.jsonl"), out, answers=killing, progress=False)
    assert len(seen) == ROWS
    assert results(out) == expected


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills")
@pytest.mark.parametrize("count", [1, 3])
def test_a_command_that_is_killed_twice_goes_on(nodes: Nodes, tmp_path: Path, count: int) -> None:
    nodes.set(count)
    given, out, here = write_rows(tmp_path / "in", MANY), tmp_path / "out", tmp_path / "here"
    options, python = ["-n", "2", "-q"], [sys.executable, "-m", "stem_edge"]
    command = [*python, "batch", str(DEMO), str(given), str(out), *options]
    for killed in (True, True, False):
        before = lines(out)
        process = subprocess.Popen([*command, f"--ray={nodes.address}"])
        while killed and lines(out) < before + MANY // 4 and process.poll() is None:
            time.sleep(0.01)
        if killed:
            process.kill()
        assert process.wait(600) == (-signal.SIGKILL if killed else 0)
    assert main(["batch", str(DEMO), str(given), str(here), *options]) == 0
    assert results(out) == results(here)
    assert len(results(out)) == MANY


@pytest.mark.slow
def test_an_error_of_loading_is_raised_here(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such"):
        list(ray_answers(tmp_path / "none", address=nodes.address)(rows(1)))

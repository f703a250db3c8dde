"""Pieces of work on machines that fail, are busy or few; real ones are in the other files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRay
from hub_server import HubServer
from installed import DEMO

from stem_edge.batches.rows import InputRow
from stem_edge.cluster.batches import ray_answers
from stem_edge.cluster.sharing import Work, share
from stem_edge.errors import InputError
from stem_edge.hub.fetch import pinned

PIECES = range(12)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A cluster of three machines, of 1, 2 and 3 CPUs."""
    fake = FakeRay(3)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def done(at_once: int = 1, bad: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Return pieces with the CPUs of their machine; of those in `bad`, opening fails."""

    def work(cpus: int) -> Callable[[int], tuple[int, int]]:
        if cpus in bad:
            raise InputError(f"no disk on {cpus}")
        return lambda piece: (piece, cpus)

    return sorted(share("auto", Work(work, lambda cpus: 1 << 20, at_once), PIECES))


def test_few_pieces_go_to_all_machines(ray: FakeRay) -> None:
    assert Counter(cpus for _, cpus in done(at_once=8)) == {1: 4, 2: 4, 3: 4}


def test_pieces_whose_results_are_lost_are_done_again(ray: FakeRay) -> None:
    ray.lost = 5
    assert [piece for piece, _ in done()] == list(PIECES)


def test_a_machine_that_cannot_begin_is_left_out(ray: FakeRay) -> None:
    with pytest.warns(UserWarning, match="machine host2 is left out: no disk on 2"):
        found = done(bad=(2,))
    assert [piece for piece, _ in found] == list(PIECES)
    assert {cpus for _, cpus in found} == {1, 3}


@pytest.mark.filterwarnings("ignore:ray")
def test_the_last_machine_that_cannot_begin_is_an_error(ray: FakeRay) -> None:
    with pytest.raises(InputError, match="no disk on 3"):
        done(bad=(1, 2, 3))


def test_a_busy_cluster_is_told_of(ray: FakeRay, capsys: pytest.CaptureFixture[str]) -> None:
    ray.busy = True
    assert [piece for piece, _ in done()] == list(PIECES)
    assert "waiting for one of 3 machines" in capsys.readouterr().err


@pytest.mark.parametrize("memory", [None, "4GB"])
def test_a_model_gets_the_memory_that_ray_reserves(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, memory: str | None
) -> None:
    def load(_: object, **keywords: Any) -> None:
        raise InputError(str(keywords["memory"]))

    ray.count = 1
    monkeypatch.setattr("stem_edge.cluster.batches.load", load)
    with pytest.raises(InputError) as said:
        list(ray_answers(DEMO, {"memory": memory})([InputRow("1", 1, b"{}")]))
    assert str(said.value) == (memory or str(ray.reserved[0]))


def test_all_machines_load_one_commit(
    ray: FakeRay, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(bundle: object, **_: object) -> None:
        raise InputError(str(bundle))

    ray.count = 1
    hub.add("org/name", DEMO)
    monkeypatch.setattr("stem_edge.cluster.batches.load", load)
    with pytest.raises(InputError) as said:
        list(ray_answers("hf:org/name")([InputRow("1", 1, b"{}")]))
    assert str(said.value) == pinned("hf:org/name") != "hf:org/name"

"""Exports on a cluster: the bytes of one machine, also if a node is killed in the midst."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from exports import contents
from ray_nodes import Nodes

import stem_edge
from stem_edge.cluster.exports import ray_shards
from stem_edge.commands.main import main
from stem_edge.errors import ExportError, StemEdgeError
from stem_edge.export.job.journal import JournalStep
from stem_edge.export.shards import ShardTask

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stem_edge.export.tables.SHARD_NBYTES", 2000)


def test_the_bytes_are_those_of_one_machine(
    nodes: Nodes, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "here")
    arguments = [str(tiny_checkpoint), str(tmp_path / "there"), f"--ray={nodes.address}"]
    assert main(["export", *arguments]) == 0
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_killed_node_changes_nothing(nodes: Nodes, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = list[str]()

    def killing(shards: ShardTask) -> Generator[JournalStep]:
        for step in ray_shards(nodes.address)(shards):
            if not done:
                nodes.kill()
            done.append(step.name)
            yield step

    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "here")
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "there", elsewhere=killing)
    assert len(done) == len({*done}) > 20
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_an_error_of_a_worker_is_raised_here(
    nodes: Nodes, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def elsewhere(shards: ShardTask) -> Generator[JournalStep]:
        (shards.folder / "export.journal").unlink()  # as on a disk that is not shared
        yield from ray_shards(nodes.address)(shards)

    with pytest.raises(ExportError, match="not seen here") as caught:
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", elsewhere=elsewhere)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "head"])
def test_no_cluster_is_an_error(tiny_checkpoint: Path, tmp_path: Path, address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(StemEdgeError, match="cannot connect"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", elsewhere=ray_shards(address))

"""Shards of the tables that other processes write: the same bytes, whatever is killed."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exports import contents

import stem_edge
from stem_edge.errors import CheckpointError, ExportError, StemEdgeError
from stem_edge.export.job.journal import JournalStep
from stem_edge.export.shards import PARTS, ShardTask

SHARD_NBYTES = 10_000


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stem_edge.export.tables.SHARD_NBYTES", SHARD_NBYTES)


class Machines:
    """Writes shards as other machines do, the last one first, after those that were killed."""

    def __init__(self, most: int | None = None, error: BaseException | None = None) -> None:
        self.names, self._most, self._error = list[str](), most, error

    def __call__(self, given: ShardTask) -> Generator[JournalStep]:
        shards = pickle.loads(pickle.dumps(given))
        tables = shards.open()
        torn = shards.folder / PARTS / "torn" / "records"
        torn.mkdir(parents=True)
        (torn / "0").write_bytes(b"half of a shard")
        for name in sorted(shards.names, reverse=True)[: self._most]:
            shards.write(name, tables)  # taken for dead, so that another one writes it again
            self.names.append(name)
            yield shards.write(name, tables)
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("kind", ["int8", "mixed"])
def test_the_bytes_are_those_of_one_machine(
    tiny_checkpoint: Path, tmp_path: Path, kind: Any
) -> None:
    text, machines = tmp_path / "text.txt", Machines()
    text.write_text("to be or not to be")
    options: dict[str, Any] = {"tables": kind, "backbone": "fp32"}
    options |= {"calibration": text} if kind == "mixed" else {}
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "here", **options)
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "there", **options, elsewhere=machines)
    assert len(machines.names) > 2
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        pytest.param(StemEdgeError("no machine is left"), marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_export_goes_on_with_the_other_shards(
    tiny_checkpoint: Path, tmp_path: Path, error: BaseException
) -> None:
    out, first, rest = tmp_path / "out", Machines(2, error), Machines()
    with pytest.raises(type(error)):
        stem_edge.export_bundle(tiny_checkpoint, out, elsewhere=first)
    stem_edge.export_bundle(tiny_checkpoint, out, elsewhere=rest)
    assert len(first.names) == 2
    assert rest.names
    assert not {*first.names} & {*rest.names}
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "expected")
    assert contents(out) == contents(tmp_path / "expected")


def test_shards_that_are_all_written_need_no_machine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def none(shards: ShardTask) -> Generator[JournalStep]:
        pytest.fail(f"asked for {shards.names}")

    out, machines = tmp_path / "out", Machines(error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stem_edge.export_bundle(tiny_checkpoint, out, elsewhere=machines)
    stem_edge.export_bundle(tiny_checkpoint, out, elsewhere=none)


def refuse(shards: ShardTask, **changed: Any) -> Generator[JournalStep]:
    replace(shards, **changed).open()
    yield from ()


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"version": "0"}, ExportError, "install one version on every machine"),
        ({"folder": Path("/nowhere")}, ExportError, "/nowhere: not seen here"),
        ({"subject": "another"}, ExportError, "not seen here with the files of the export"),
        ({"files": {Path("/no/x"): (1, 2)}}, CheckpointError, "/no/x: missing here"),
    ],
)
def test_a_machine_that_does_not_see_the_same_files_says_so(
    tiny_checkpoint: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    error: type[StemEdgeError],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        stem_edge.export_bundle(
            tiny_checkpoint, tmp_path / "out", elsewhere=lambda shards: refuse(shards, **changed)
        )
    assert not list(tmp_path.iterdir())


def test_adding_a_backbone_has_nothing_to_share(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="add writes none"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", add=True, elsewhere=Machines())

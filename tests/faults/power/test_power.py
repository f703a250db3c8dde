"""Power cuts at every operation of an export leave the old bundle, the new one, or none.

An export is recorded once and replayed with losses (crash_states.py); states are judged in memory,
and a sample is put on a disk, where the same export is run again and must end in the same bytes.
X1, kills, is in test_kills.py.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from contract import refused
from crash_states import (
    ROOT,
    CrashState,
    Names,
    Op,
    Recorder,
    Sync,
    Tree,
    below,
    crash_states,
    write_tree,
)
from faulty_disk import CHANGES, Failing, watch
from recorded_exports import ASIDE, WORK, Recorded, finish, record_export
from tiny_exports import KINDS, Exports, TinyExport, bundle_files, many_writes

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError, ExportError

pytestmark = pytest.mark.slow

LEAST_STATES = 2000
AGAIN = 60


@pytest.fixture(scope="module")
def recorded(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Exports of every kind."""
    folder = tmp_path_factory.mktemp("recorded")
    return {kind: record_export(exports[kind], folder / kind) for kind in KINDS}


def verdict(tree: Tree, export: TinyExport, out: str = "out") -> str:
    """Return "old", "new", "aside" (the old one has another name), "none", or what is wrong."""
    old, new = bundle_files(export.old) if export.old else None, bundle_files(export.new)
    found = _files(tree, out)
    if found is None:
        aside = _files(tree, ASIDE)
        return "aside" if aside is not None and aside == old else "none"
    return "old" if found == old else "new" if found == new else f"{len(found)} strange files"


def _files(tree: Tree, folder: str) -> dict[str, bytes] | None:
    part = below(tree, folder)
    return None if part is None else {name: d for name, d in part.items() if d is not None}


ALLOWED = {
    "new": {"none", "new"}, "force": {"old", "aside", "new"},
}  # fmt: skip


def test_x2_every_power_cut_leaves_the_old_or_the_new_bundle(
    recorded: dict[str, Recorded], tmp_path: Path
) -> None:
    """Checks at least 2,000 different states. Without a bundle, opening it fails."""
    keys, opened = set[tuple[str, int]](), set[int]()
    for kind, record in recorded.items():
        found = set()
        for state in record.states():
            said = verdict(state.tree, record.export)
            assert said in ALLOWED[kind], f"{kind}, after {state.after}: {said}"
            found.add(said)
            keys.add((kind, state.key))
            if said in ("none", "aside") and len(opened) < 40 and state.key not in opened:
                opened.add(state.key)
                _does_not_open(state, tmp_path / f"{kind}-{len(opened)}")
        assert found == ALLOWED[kind]
    assert len(keys) >= LEAST_STATES


def _does_not_open(state: CrashState, folder: Path) -> None:
    """Check that neither `out` opens, nor the working folder unless it is complete."""
    folder.mkdir()
    write_tree(state.tree, folder)
    refused(lambda: open_bundle(folder / "out"), BundleError, folder / "out")
    try:
        open_bundle(folder / WORK)
    except BundleError as error:
        assert str(folder / WORK) in str(error)
    else:
        assert set(stem_edge.verify(folder / WORK).values()) == {"ok"}
    shutil.rmtree(folder)


@pytest.mark.parametrize("dropped", ["files", "folders below", "folder above"])
def test_x2_the_replay_sees_a_sync_that_is_missing(
    recorded: dict[str, Recorded], dropped: str
) -> None:
    """Tests the test: a log without some of its syncs leads to wrong states."""
    record = recorded["force"]
    makes = {
        after: op.makes
        for op in record.log
        if isinstance(op, Names)
        for _, _, after in op.changes
        if op.makes
    }
    kinds = {"file": "files", "folder": "folders below"}

    def is_dropped(op: Op) -> bool:
        if not isinstance(op, Sync):
            return False
        return dropped == ("folder above" if op.node == ROOT else kinds.get(makes.get(op.node, "")))

    log = [op for op in record.log if not is_dropped(op)]
    assert len(log) < len(record.log)
    said = {verdict(state.tree, record.export) for state in record.states(8, log)}
    assert said - ALLOWED["force"]


def test_x2_a_sample_of_power_cuts_is_followed_by_the_same_export(
    recorded: dict[str, Recorded], tmp_path: Path
) -> None:
    """The export starts again, and ends with the same bytes and nothing left over."""
    for number, (record, state) in enumerate(_sample(recorded, AGAIN)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tree(state.tree, folder)
        finish(record.export, folder / "out")
        shutil.rmtree(folder)


def _sample(recorded: dict[str, Recorded], count: int) -> list[tuple[Recorded, CrashState]]:
    """Yield different states of all kinds in turn, from all over their logs."""
    rng, chosen = random.Random(3), list[tuple[Recorded, CrashState]]()
    for record in recorded.values():
        states = {state.key: state for state in record.states()}
        keys = sorted(states, key=lambda key: states[key].after)
        for key in sorted(rng.sample(range(len(keys)), count // len(recorded))):
            chosen.append((record, states[keys[key]]))
    return chosen


def test_x3_success_is_reported_only_when_no_power_cut_can_take_it_back(
    recorded: dict[str, Recorded], tmp_path: Path
) -> None:
    for record in recorded.values():
        last = [state for state in record.states() if state.after == len(record.log)]
        assert {verdict(state.tree, record.export) for state in last} == {"new"}


def test_x3_folders_that_the_export_made_are_durable_too(exports: Exports, tmp_path: Path) -> None:
    deep = record_export(exports["new"], tmp_path / "deep", "a/b/out")
    for state in deep.states():
        done = state.after == len(deep.log)
        assert verdict(state.tree, deep.export, "a/b/out") in ("new", "new" if done else "none")


def test_x4_a_file_of_the_right_size_with_zeros_in_it_is_found(tiny_copy: Path) -> None:
    """Verify finds them in every file, which sizes alone cannot show."""
    for name, entry in open_bundle(tiny_copy).manifest.files.items():
        whole = (tiny_copy / name).read_bytes()
        data, page = bytearray(whole), slice(len(whole) // 2, len(whole) // 2 + 4096)
        assert any(data[page])
        data[page] = bytes(len(data[page]))
        (tiny_copy / name).write_bytes(data)
        results = stem_edge.verify(tiny_copy)
        assert {n for n, said in results.items() if said != "ok"} == {name}
        assert entry.sha256 in results[name]
        (tiny_copy / name).write_bytes(whole)


def test_x5_a_cut_while_the_old_bundle_is_deleted_leaves_the_new_one(
    recorded: dict[str, Recorded],
) -> None:
    record = recorded["force"]
    place = max(n for n, op in enumerate(record.log) if op == Sync(ROOT)) + 1
    states = [state for state in record.states() if state.after > place]
    assert len({state.key for state in states}) > 50
    assert {verdict(state.tree, record.export) for state in states} == {"new"}


def test_x6_a_second_fault_during_recovery_from_the_first(
    recorded: dict[str, Recorded], tmp_path: Path
) -> None:
    """An operation of the second export fails, or the power fails again: at least 50 pairs."""
    pairs, rng = 0, random.Random(6)
    for number, (record, state) in enumerate(_sample(recorded, 6)):
        folder = tmp_path / str(number)
        if verdict(state.tree, record.export) == "new":
            continue
        pairs += _power_goes_again(record.export, state, folder, rng)
        for first in (0, 10, 25, 60):
            pairs += _operation_fails(record.export, state, folder, first + rng.randrange(8), rng)
    assert pairs >= 50


def _power_goes_again(
    export: TinyExport, state: CrashState, folder: Path, rng: random.Random
) -> int:
    folder.mkdir()
    write_tree(state.tree, folder)
    with pytest.MonkeyPatch.context() as patch:
        many_writes(patch)
        recorder = Recorder(folder)
        recorder.install(patch)
        export.run(folder / "out")
    shutil.rmtree(folder)
    again = list(crash_states(recorder.before, recorder.log, 5, rng))
    allowed = {"old", "new", "aside"} if export.old else {"none", "new"}
    assert {verdict(second.tree, export) for second in again} <= allowed
    folder.mkdir()
    write_tree(rng.choice(again).tree, folder)
    finish(export, folder / "out")
    shutil.rmtree(folder)
    return len({second.key for second in again})


def _operation_fails(
    export: TinyExport, state: CrashState, folder: Path, first: int, rng: random.Random
) -> int:
    folder.mkdir()
    write_tree(state.tree, folder)
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(first, rng.choice([5, 28]), for_ever=rng.random() < 0.5)
        watch(patch, CHANGES, failing)
        try:
            export.run(folder / "out")
        except ExportError as error:
            assert len(str(error).splitlines()) == 1
    found = bundle_files(folder / "out")
    kept = [None, *(bundle_files(path) for path in (export.old, export.new) if path)]
    assert found in kept
    finish(export, folder / "out")
    shutil.rmtree(folder)
    return int(failing.failed)

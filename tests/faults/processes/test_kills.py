"""Catalogue X1: SIGKILL at operations of an export.

test_power.py computes what every moment could leave; a few real kills show that its model is right.

A kill is no power cut: what was written is there, synced or not. Processes are forked and killed,
which only POSIX has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helper_process import HelperProcess
from kill_helper import Job
from tiny_exports import Exports, Kind, TinyExport, bundle_files

from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError
from stem_edge.export.quantization import calibration

ASIDE = ".stem-edge-out-old"
FINISHED_OF = 5  # after one in so many kills, finish the export
MAX_CALLS = 500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork and no SIGKILL here"),
]


class Killer(HelperProcess):
    """A running kill_helper.py."""

    def run(self, job: Job) -> dict[str, Any]:
        """Run a job, with the text of this process, and return the answer."""
        answer = self.ask(asdict(replace(job, text=str(calibration.SHIPPED))), 600.0)
        assert answer["killed"] or answer["status"] == 0
        return answer


@pytest.fixture(scope="module")
def killer(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    """A helper process shared by all tests."""
    folder = tmp_path_factory.mktemp("imports")
    with Killer("kill_helper.py", folder / "stderr") as killer:
        killer.run(Job("new", str(exports["new"].checkpoint), str(folder / "out"), imports=True))
        yield killer


def check(export: TinyExport, out: Path) -> str:
    """Check that a kill left the old bundle, the new one, or none that opens."""
    found = bundle_files(out)
    if found is not None:
        assert found == bundle_files(export.new) or (
            export.old is not None and found == bundle_files(export.old)
        )
        return "bundle"
    with pytest.raises(BundleError, match="out"):
        open_bundle(out)
    if export.old is not None:
        assert bundle_files(out.with_name(ASIDE)) == bundle_files(export.old)
    return "none"


def finish(killer: Killer, export: TinyExport, out: Path) -> None:
    """Run the same export again."""
    if bundle_files(out) != bundle_files(export.new):
        killer.run(Job(export.kind, str(export.checkpoint), str(out)))
        assert {path.name for path in out.parent.iterdir()} <= {"out", ".stem-edge-out.lock"}
    assert bundle_files(out) == bundle_files(export.new)


@pytest.mark.parametrize(("kind", "step"), [("new", 6), ("force", 1)])
def test_x1_a_kill_at_an_operation(
    kind: Kind, step: int, exports: Exports, killer: Killer, tmp_path: Path
) -> None:
    """Between the two renames of a replacement there is no bundle of that name."""
    export, found = exports[kind], set[str]()
    for at in range(0, MAX_CALLS, step):
        folder = tmp_path / str(at)
        folder.mkdir()
        out = export.prepare(folder)
        job = Job(kind, str(export.checkpoint), str(out), at=at)
        if not killer.run(job)["killed"]:
            break
        found.add(check(export, out))
        if at % FINISHED_OF == 0:
            finish(killer, export, out)
        shutil.rmtree(folder)
    assert at > 35
    assert bundle_files(out) == bundle_files(export.new)
    assert found == ({"none"} if kind == "new" else {"bundle", "none"})

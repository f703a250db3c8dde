"""Real file systems that are full or lose their power, where root may mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract import refused
from tiny_exports import Exports, bundle_files

from stem_edge.errors import ExportError


def mounting() -> str | None:
    """Return why nothing can be mounted here; empty if it can."""
    if sys.platform != "linux" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root can mount file systems, and only on Linux is it done here"
    missing = [tool for tool in ("mount", "umount", "mkfs.ext4") if shutil.which(tool) is None]
    return f"there is no {missing[0]}" if missing else None


def command(*arguments: str | Path) -> None:
    """Run a command; a test that cannot mount is skipped, and says so."""
    done = subprocess.run([str(a) for a in arguments], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"{arguments[0]} does not work here: {done.stderr.decode().strip()[:80]}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount with mount(name, *arguments), which returns the folder; unmount all at the end."""
    if (reason := mounting()) is not None:
        pytest.skip(reason)
    mounted: list[Path] = []

    def mount(name: str, *arguments: str | Path) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command("mount", *arguments, folder)
        mounted.append(folder)
        return folder

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", str(folder)], check=False)


def test_d1_a_real_disk_that_is_full(
    exports: Exports, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small tmpfs with the old bundle fills up, and is then enlarged."""
    folder = mount("small", "-t", "tmpfs", "-o", "size=256k", "none")
    export = exports["force"]
    out = export.prepare(folder)
    with monkeypatch.context() as patch:
        patch.setattr("stem_edge.export.job.publish.free_nbytes", lambda _: 1 << 40)
        refused(lambda: export.run(out), ExportError, out, "the disk is full", "B free", kept=[out])
    command("mount", "-o", "remount,size=4m", folder)
    export.run(out)
    assert bundle_files(out) == bundle_files(export.new)
    assert [path.name for path in folder.iterdir()] == ["out"]

"""Disks that are full, broken or write-protected during an export. Reading: test_reading.py."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from contract import checked_message, refused
from faulty_disk import CHANGES, Failing, watch
from tiny_exports import Exports, Kind, TinyExport, bundle_files

from stem_edge.bundle.absent import OLD, WORKING
from stem_edge.errors import ExportError

MAX_CALLS = 500


def failing_export(
    export: TinyExport, folder: Path, failing: Failing, names: tuple[str, ...] = CHANGES
) -> str | None:
    """An export on a disk that fails, then one on a good disk. Returns the message of the first,
    None if it succeeded. `out` is what it was, or new where only the deletion of the old failed."""
    folder.mkdir()
    out, message = export.prepare(folder), None
    old, new = bundle_files(out), bundle_files(export.new)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, names, failing)
        try:
            export.run(out)
        except ExportError as error:
            message = checked_message(str(error))
    if message is None:
        assert bundle_files(out) == new
    else:
        # On a disk that takes nothing any more, names cannot be changed back either: the old bundle
        # may then lie beside its place until the next export.
        aside = folder / f"{WORKING}{out.name}{OLD}"
        assert bundle_files(out) in ([old, new, None] if failing.for_ever else [old])
        assert bundle_files(out) is not None or bundle_files(aside) == old
        export.finish(out)
        assert bundle_files(out) == new
        if not failing.for_ever:
            assert [path.name for path in folder.iterdir()] == ["out"]
    shutil.rmtree(folder)
    return message


def every_failure(
    export: TinyExport, folder: Path, numbers: list[int], names: tuple[str, ...] = CHANGES
) -> dict[int, str]:
    """Fail calls one at a time, every third of them for ever. Returns call -> message.

    Of all changes it is each fifth call, of chosen ones each: an export on a bad disk takes 0.1 s.
    """
    messages: dict[int, str] = {}
    for at in range(0, MAX_CALLS, 5 if names is CHANGES else 1):
        failing = Failing(at, numbers[at % len(numbers)], for_ever=at % 3 == 2)
        message = failing_export(export, folder / str(at), failing, names)
        if not failing.failed:
            return messages
        if message is not None:
            messages[at] = message
    raise AssertionError("an export of so few files ends")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "force"])
def test_d1_a_full_disk_at_every_change(kind: Kind, exports: Exports, tmp_path: Path) -> None:
    messages = every_failure(exports[kind], tmp_path, [errno.ENOSPC])
    full = [message for message in messages.values() if "the disk is full" in message]
    assert len(full) > 6


def test_d1_a_disk_without_room_is_refused_before_anything_is_written(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    export, out = exports["force"], exports["force"].prepare(tmp_path)
    said = (out, "1 kB free", "B needed", "--cache-dir")
    refused(lambda: export.run(out), ExportError, *said, kept=[out], seconds=60)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_d2_quotas_limits_and_protection_at_every_change(exports: Exports, tmp_path: Path) -> None:
    numbers = [errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES]
    messages = every_failure(exports["force"], tmp_path, numbers)
    assert len(messages) > 6
    for at, message in messages.items():
        assert os.strerror(numbers[at % 4]) in message


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_d3_a_failed_sync_is_never_asked_again(
    number: int, exports: Exports, tmp_path: Path
) -> None:
    """The next export writes the file again from the checkpoint."""
    messages = every_failure(exports["force"], tmp_path, [number], ("fsync", "sync_folder"))
    assert len(messages) > 12  # each file, each folder, and the folder above


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EXDEV, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("kind", ["new", "force"])
def test_d4_names_that_cannot_be_changed(
    number: int, kind: Kind, exports: Exports, tmp_path: Path
) -> None:
    messages = every_failure(exports[kind], tmp_path, [number], ("rename",))
    assert messages
    assert all(os.strerror(number) in message for message in messages.values())

"""Disks that are full, broken, slow or gone, for the exporter and for the row store."""

from __future__ import annotations

import ast
import errno
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract import checked_message, refused
from faulty_disk import CHANGES, Counter, Failing, flip_bits, interrupt, shorten, slow, watch
from tiny_exports import (
    Kind,
    TinyExport,
    bundle_files,
    exports,  # noqa: F401 - a fixture
)

import stem_edge
from stem_edge import disk
from stem_edge.bundle import open_bundle
from stem_edge.errors import BundleError, ExportError, RowReadError
from stem_edge.export.files import Leftover
from stem_edge.runtime.model import Model
from stem_edge.runtime.store import open_store

ROOT = Path(stem_edge.__file__).parents[1]
PROMPT = list(range(3, 40, 3))
NEW_TOKENS = 6
SLOTS = 24  # of 300 records: rows are read all the time
MAX_CALLS = 500


def failing_export(
    export: TinyExport, folder: Path, failing: Failing, names: tuple[str, ...] = CHANGES
) -> str | None:
    """An export on a disk that fails, then one on a good disk. Returns the message of the first,
    None if it succeeded. `out` is what it was, or new where only the deletion of the old failed."""
    folder.mkdir()
    out, message = export.prepare(folder), None
    old, new = bundle_files(out), bundle_files(export.new)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(disk, "_sync", lambda descriptor: None)  # it takes its time
        watch(patch, names, failing)
        try:
            export.run(out)
        except ExportError as error:
            message = checked_message(str(error))
    if message is None:
        assert bundle_files(out) == new
        assert not failing.failed or any("could not be deleted" in str(w.message) for w in warned)
    else:
        # On a disk that takes nothing any more, names cannot be changed back either.
        assert bundle_files(out) in ([old, new] if failing.for_ever else [old])
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", Leftover)
            patch.setattr(disk, "_sync", lambda descriptor: None)
            export.finish(out)
        assert bundle_files(out) == new
        if not failing.for_ever:
            assert [path.name for path in folder.iterdir()] == ["out"]
    shutil.rmtree(folder)
    return message


def every_failure(
    export: TinyExport, folder: Path, numbers: list[int], names: tuple[str, ...] = CHANGES
) -> dict[int, str]:
    """The k-th call fails, for every k; every third time for ever. Call -> message."""
    messages: dict[int, str] = {}
    for at in range(MAX_CALLS):
        failing = Failing(at, numbers[at % len(numbers)], for_ever=at % 3 == 2)
        message = failing_export(export, folder / str(at), failing, names)
        if not failing.failed:
            return messages
        if message is not None:
            messages[at] = message
    raise AssertionError("an export of so few files ends")


@pytest.mark.parametrize("kind", ["new", "force"])
def test_d1_a_full_disk_at_every_change(
    kind: Kind,
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
) -> None:
    messages = every_failure(exports[kind], tmp_path, [errno.ENOSPC])
    assert len(messages) > 40
    full = [message for message in messages.values() if "the disk is full" in message]
    assert len(full) > 40
    with_needs = [m for m in full if "bytes free, about " in m and " more are needed)" in m]
    assert len(with_needs) > 30


def test_d1_a_disk_without_room_is_refused_before_anything_is_written(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    export, out = exports["force"], exports["force"].prepare(tmp_path)
    message = refused(
        lambda: export.run(out), ExportError, out, "1,000 are free", kept=[out], seconds=60
    )
    assert "bytes are needed" in message
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_d2_quotas_limits_and_protection_at_every_change(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
) -> None:
    numbers = [errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES]
    messages = every_failure(exports["force"], tmp_path, numbers)
    assert len(messages) > 40
    for at, message in messages.items():
        assert os.strerror(numbers[at % 4]) in message


def test_d2_a_folder_that_cannot_be_written(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A real one; root may write anywhere but into what is no folder."""
    (tmp_path / "file").write_text("x")
    export = exports["new"]
    refused(
        lambda: export.run(tmp_path / "file" / "out"), ExportError, tmp_path / "file", seconds=60
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_d3_a_failed_sync_is_never_asked_again(
    number: int,
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
) -> None:
    """What it was of is written again from the checkpoint, by the next export."""
    messages = every_failure(exports["force"], tmp_path, [number], ("fsync", "sync_folder"))
    assert len(messages) > 25


def test_d3_a_step_whose_sync_failed_is_done_again(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages of a failed sync look clean: its file must be another one the next time."""
    export, out = exports["new"], tmp_path / "out"
    created: list[str] = []
    create = disk.create

    def noted(path: Path) -> int:
        created.append(path.name)
        return create(path)

    monkeypatch.setattr(disk, "create", noted)
    with monkeypatch.context() as patch:
        watch(patch, ["fsync"], Failing(4, errno.ENOSPC))
        with pytest.raises(ExportError, match="go on from there"):
            export.run(out)
    failed = created[-1]
    assert failed == "backbone.onnx.data"
    created.clear()
    with pytest.warns(Leftover, match="used again: 1"):
        export.run(out)
    assert failed in created
    assert "tokenizer.json" not in created
    assert bundle_files(out) == bundle_files(export.new)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("kind", ["new", "force"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_d4_names_that_cannot_be_changed(
    number: int,
    kind: Kind,
    exchanges: bool,
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchanges:
        monkeypatch.setattr(disk, "exchange", lambda first, second: False)
    messages = every_failure(exports[kind], tmp_path, [number], ("rename", "exchange"))
    assert len(messages) >= 2
    assert all(os.strerror(number) in message for message in messages.values())


def test_d4_temporary_files_are_beside_their_place(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no rename crosses file systems."""
    pairs: list[tuple[Path, Path]] = []

    def noting(call: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
        def noted(source: Path, target: Path) -> object:
            pairs.append((source, target))
            return call(source, target)

        return noted

    monkeypatch.setattr(disk, "rename", noting(disk.rename))
    monkeypatch.setattr(disk, "exchange", noting(disk.exchange))
    export = exports["force"]
    export.run(export.prepare(tmp_path))
    assert len(pairs) == 2
    assert all(source.parent == target.parent for source, target in pairs)


def test_d_writes_that_are_short_or_interrupted_change_nothing(
    exports: dict[Kind, TinyExport],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export = exports["force"]
    shorten(monkeypatch, 501)
    count = interrupt(monkeypatch, ["write"], every=3)
    out = export.prepare(tmp_path)
    export.run(out)
    assert len(count) > 100
    assert bundle_files(out) == bundle_files(export.new)


def load(bundle: Path, **options: object) -> Model:
    """A model that reads rows again and again."""
    return stem_edge.load(bundle, slots=SLOTS, warm_start=False, threads=1, **options)  # type: ignore[arg-type]


def generate(model: Model) -> list[int]:
    """Greedy tokens."""
    chunks = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> list[int]:
    """What a good disk gives."""
    with load(tiny_bundle) as model:
        return generate(model)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("for_ever", [False, True])
def test_d5_the_kth_read_fails_in_a_generation(
    for_ever: bool, overlap: bool, tiny_bundle: Path, expected: list[int]
) -> None:
    """For every k: the right tokens or an error, never others; then the model is as before."""
    errors = 0
    for at in range(MAX_CALLS):
        with load(tiny_bundle, overlap=overlap) as model:
            failing = Failing(at, errno.EIO, for_ever=for_ever)
            with pytest.MonkeyPatch.context() as patch:
                watch(patch, ["pread"], failing)
                try:
                    assert generate(model) == expected
                except RowReadError as error:
                    checked_message(str(error), "record ", "c/0/0", "at byte")
                    errors += 1
            assert generate(model) == expected
        if not failing.failed:
            break
    assert at > 10
    # Once: read once more. For ever: reported, unless it was a row that was fetched for nothing.
    assert errors == 0 if not for_ever else errors >= at - 1


def test_d5_the_kth_read_fails_while_a_bundle_is_loaded(tiny_bundle: Path) -> None:
    """Loads, or says what it could not read."""
    refusals = 0
    for at in range(MAX_CALLS):
        failing = Failing(at, errno.EIO, for_ever=at % 2 == 1)
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, ("open_file", "pread"), failing)
            try:
                load(tiny_bundle).close()
            except BundleError as error:
                checked_message(str(error), tiny_bundle)
                refusals += 1
        if not failing.failed:
            break
    assert refusals > 3
    load(tiny_bundle).close()


def test_d5_a_wrong_bit_that_is_read_once_is_read_again(
    tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_bundle) as model:
        with monkeypatch.context() as patch:
            count = flip_bits(patch, lambda at: at % 2 == 0)  # every record, the first time
            assert generate(model) == expected
        assert len(count) > 10
    with load(tiny_bundle) as model:
        flip_bits(monkeypatch, lambda at: True)
        with pytest.raises(RowReadError, match=r"record \d+ at byte \d+: its crc32c is"):
            generate(model)


def test_d5_neighbours_of_a_bad_record_are_served(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    format = bundle.manifest.table_format
    assert format is not None
    numbers = [0, 1, 2, 5, 6]
    import numpy as np

    with open_store(bundle.file("tables.zarr"), format) as store:
        whole = store.read(np.array(numbers))
        pread, stride = disk.pread, store.layout.record_nbytes + 4
        with pytest.MonkeyPatch.context() as patch:

            def broken(descriptor: int, buffer: memoryview, offset: int) -> int:
                if offset <= 2 * stride < offset + len(buffer):
                    raise OSError(errno.EIO, "Input/output error")
                return pread(descriptor, buffer, offset)

            patch.setattr(disk, "pread", broken)
            with pytest.raises(RowReadError, match=rf"record 2 at byte {2 * stride}: Input/output"):
                store.read(np.array(numbers))
            assert np.array_equal(store.read(np.array([0, 1, 5, 6])), whole[[0, 1, 3, 4]])
        assert np.array_equal(store.read(np.array(numbers)), whole)


def test_d5_reads_that_are_short_or_interrupted_change_nothing(
    tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_bundle) as model:
        shorten(monkeypatch, 7)
        interrupt(monkeypatch, ["pread"], every=2)
        assert generate(model) == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_d6_slow_reads_give_the_same_tokens(
    overlap: bool, tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 ms for each: slower, and that is all."""
    with load(tiny_bundle, overlap=overlap) as model:
        slow(monkeypatch, ["pread"], 0.05)
        assert generate(model) == expected


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ESTALE, errno.ENXIO])
def test_d7_a_medium_that_is_gone_is_reported_and_may_come_back(
    number: int, tiny_bundle: Path, expected: list[int]
) -> None:
    """There is no server: the process stays, other models too, and loading again works."""
    with load(tiny_bundle) as model:
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, ("open_file", "pread"), Failing(0, number, for_ever=True))
            for _ in range(2):
                refused(lambda: generate(model), RowReadError, os.strerror(number), "storage")
            refused(lambda: load(tiny_bundle), BundleError, tiny_bundle)
        assert generate(model) == expected
    with load(tiny_bundle) as again:
        assert generate(again) == expected


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENODEV])
def test_d8_shards_that_cannot_be_mapped(
    number: int, tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmap is asked for by name, so it is not replaced unasked: the error names what needs none."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("stem_edge.runtime.store.mmap.mmap", refuse)
    refused(
        lambda: load(tiny_bundle, reads="mmap"),
        BundleError,
        "c/0/0",
        os.strerror(number),
        'reads="pread"',
    )
    with load(tiny_bundle) as model:
        assert generate(model) == expected


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_d9_statistics_that_cannot_be_written_disturb_nothing(
    number: int,
    tiny_bundle: Path,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts of the row cache are all that a running model writes."""
    failing = Failing(0, number, for_ever=True)
    with stem_edge.load(tiny_bundle, slots=SLOTS, cache_dir=tmp_path, threads=1) as model:
        watch(monkeypatch, CHANGES, failing)
        assert generate(model) == expected
    assert failing.failed
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".npy"]


def test_d10_no_duration_is_taken_from_a_clock_that_jumps() -> None:
    """Of the whole package: only clocks that go on steadily are asked."""
    calls = Counter()
    for folder in ("stem_edge", "export", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute):
                    name = ast.unparse(node)
                    assert name not in ("time.time", "time.time_ns", "time.localtime"), path
                    if name in ("time.perf_counter", "time.monotonic"):
                        calls(name)
    assert len(calls) > 3


# Real file systems, where root may mount them.


def mounting() -> str | None:
    """Why nothing can be mounted here."""
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
    """mount(name, *arguments) mounts and returns the folder; all are unmounted afterwards."""
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
    exports: dict[Kind, TinyExport],  # noqa: F811
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small tmpfs with the old bundle on it; then it grows. Free space is not asked first."""
    folder = mount("small", "-t", "tmpfs", "-o", "size=256k", "none")
    export = exports["force"]
    out = export.prepare(folder)
    with monkeypatch.context() as patch:
        patch.setattr("stem_edge.export.space.free_nbytes", lambda _: 1 << 40)
        refused(
            lambda: export.run(out), ExportError, out, "the disk is full", "bytes free", kept=[out]
        )
    command("mount", "-o", "remount,size=4m", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Leftover)
        export.run(out)
    assert bundle_files(out) == bundle_files(export.new)
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_x2_a_copied_image_of_a_mounted_disk(
    exports: dict[Kind, TinyExport],  # noqa: F811
    mount: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A real journal is replayed: what an ext4 holds on its medium at five moments of an export."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    command("mkfs.ext4", "-q", "-F", image)
    folder = mount("disk", "-o", "loop", image)
    export = exports["force"]
    out = export.prepare(folder)
    os.sync()
    cuts, count = random.Random(2).sample(range(5, 75), 5), Counter()
    copies: list[Path] = []

    def before(name: str) -> None:
        if count(name) in cuts:
            copies.append(Path(shutil.copy(image, tmp_path / f"copy{len(copies)}")))

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, CHANGES, before)
        export.run(out)
    copies.append(Path(shutil.copy(image, tmp_path / "last")))  # success was reported
    assert len(copies) == 6
    ends = [bundle_files(export.old), bundle_files(export.new)] if export.old else []
    for number, copy in enumerate(copies):
        found = mount(f"cut{number}", "-o", "loop", copy) / "out"
        assert bundle_files(found) in ends
        if number == 5:
            assert bundle_files(found) == ends[1]
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Leftover)
            export.finish(found)
        assert bundle_files(found) == ends[1]

"""Prompts in files: what a later process finds again, which files go, and that a damaged one is a miss."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import msgspec
import numpy as np
import pytest
from guessing import answered
from installed import HAS_GGML
from models import GGML, ORT

import stem_edge

IDS = np.random.default_rng(5).integers(3, 250, 400).tolist()
LIMIT = 2 << 30  # bytes of all files
POSIX = pytest.mark.skipif(os.name != "posix", reason="owners and modes of files are POSIX's")


@pytest.fixture(scope="module")
def bundle(shared: Path) -> Path:
    return models.bundle_of("gate", ORT, shared)


@pytest.fixture(scope="module")
def right(bundle: Path) -> Any:
    """The answer to the first 130 tokens, as it is computed."""
    with stem_edge.load(bundle, threads=1) as model:
        return answered(model, IDS[:130], max_new_tokens=4)


def taken(bundle: Path, folder: Path, ids: Any, **options: Any) -> tuple[int, Any]:
    """Return how many tokens of a prompt a new process's model finds in files, and its answer."""
    with stem_edge.load(bundle, prompt_cache=folder, **{"threads": 1} | options) as model:
        answer = answered(model, ids, max_new_tokens=4)
        return model.stats.cached_tokens, answer


@pytest.fixture
def path(bundle: Path, tmp_path: Path) -> Path:
    """The file of a prompt of 130 tokens, alone in its folder."""
    taken(bundle, tmp_path / "p", IDS[:130])
    (made,) = (tmp_path / "p").iterdir()
    return made


def again(bundle: Path, folder: Path, original: Path, ids: Sequence[int], **options: Any) -> int:
    """Look for a prompt in a copy of a folder, which stays as it was."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    return taken(bundle, folder, ids, **options)[0]


def test_what_is_found_again(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    taken(bundle, folder, IDS[:300])
    (path,) = folder.iterdir()
    if os.name == "posix":
        assert [one.stat().st_mode & 0o777 for one in (path, folder)] == [0o600, 0o700]
    for ids, options, count in (
        ([*IDS[:300], *range(5, 65)], {}, 300),
        ([*IDS[:151], 1, 2], {}, 150),
        (IDS[:300], {}, 298),
        ([*IDS[:100], 1, *IDS[101:]], {}, 0),
        (IDS[:198], {"context_length": 200}, 196),
    ):
        assert again(bundle, tmp_path / "copy", folder, ids, **options) == count
    assert again(models.bundle_of("gate", ORT, bundle.parent), tmp_path / "c", folder, IDS) == 300


@pytest.mark.parametrize("engine", [ORT, *([GGML] if HAS_GGML else [])])
def test_what_keys_and_values_depend_on(engine: str, shared: Path, tmp_path: Path) -> None:
    bundle, kv = models.bundle_of("stem-plus", engine, shared), "fp16" if engine == GGML else "int8"
    usual: dict[str, Any] = {"kv": "fp32", "engine": engine}
    taken(bundle, tmp_path / "p", IDS[:300], **usual)
    for changes in ({"kv": kv}, {"threads": 2}):
        assert again(bundle, tmp_path / "c", tmp_path / "p", IDS, **usual | changes) == 0
    assert again(bundle, tmp_path / "c", tmp_path / "p", IDS, **usual) >= 128
    other = models.bundle_of("gate", engine, shared)
    assert again(other, tmp_path / "c", tmp_path / "p", IDS, **usual) == 0


def test_a_longer_prompt_replaces_a_shorter_one_and_other_steps_the_same(
    bundle: Path, tmp_path: Path
) -> None:
    for count, slots in ((200, 64), (300, 64), (200, 64), (260, 64), (300, 16), (300, 64)):
        taken(bundle, tmp_path / "p", IDS[:count], slots=slots)
        assert len(list((tmp_path / "p").iterdir())) == 1
    assert taken(bundle, tmp_path / "p", IDS)[0] == 300


def test_short_and_edited_prompts_are_not_written(bundle: Path, tmp_path: Path) -> None:
    """What comes before the first edited token is."""
    edit, folder = stem_edge.make_edit(bundle, "cat", "dog", scheme="swap"), tmp_path / "p"
    taken(bundle, folder, IDS[:100])
    text: Any
    for text in ("cat " + "ab" * 100, "ab " * 70 + "cat " + "de" * 60):
        assert not folder.exists()
        with stem_edge.load(bundle, prompt_cache=folder, threads=1) as model, model.edited(edit):
            answered(model, text, max_new_tokens=4)
    assert taken(bundle, folder, text)[0] == 210


def test_the_files_that_were_used_least_recently_go(bundle: Path, tmp_path: Path) -> None:
    """A file that is nothing but large takes the place of many."""
    folder, prompts = tmp_path / "p", [[start, *IDS[:199]] for start in (100, 101, 102, 103)]
    for ids in prompts[:3]:
        taken(bundle, folder, ids)
        for item in folder.iterdir():
            os.utime(item, (0, item.stat().st_mtime - 100))
    assert taken(bundle, folder, prompts[0])[0]
    nbytes = item.stat().st_size
    (large := folder / f"{'0' * 32}-{'0' * 32}.prefix").touch(0o600)
    os.truncate(large, LIMIT - 7 * nbytes // 2)
    taken(bundle, folder, prompts[3])
    large.unlink()
    found = [again(bundle, tmp_path / "c", folder, ids) for ids in prompts]
    assert [bool(count) for count in found] == [True, False, True, True]


def test_files_of_others_are_neither_counted_nor_removed(bundle: Path, path: Path) -> None:
    """Nor are those that a process may still write."""
    key, folder = path.name[:32], path.parent
    names = ["model.prefix", "notes.tmp", f".{'0' * 8}.tmp", f"{key}.prefix"]
    names += [f"{key}-model.prefix", f"{key}-{'a' * 32}.prefix.part"]
    new, old = f".{'0' * 16}.tmp", f".{'1' * 16}.tmp"
    for name in (*names, new, old):
        (folder / name).touch(0o600)
        os.truncate(folder / name, LIMIT)
        os.utime(folder / name, (time.time() - (60 if name == new else 7200),) * 2)
    taken(bundle, folder, IDS[100:300])
    left = {one.name for one in folder.iterdir()}
    assert left > {*names, new, path.name} and len(left) == len(names) + 3
    assert all((folder / name).stat().st_size == LIMIT for name in names)


def test_flipped_bits_and_other_lengths(bundle: Path, path: Path, right: Any) -> None:
    whole = path.read_bytes()
    flips = [*range(0, 1200, 37), *range(1200, len(whole), len(whole) // 15), len(whole) - 2]
    cuts = [0, 1, 7, 8, 9, 100, 1000, len(whole) - 5, len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in flips]
    for data in (*damaged, *(whole[:size] for size in cuts), whole + b"0"):
        path.write_bytes(data)
        path.chmod(0o600)
        assert taken(bundle, path.parent, IDS[:130]) == (0, right)
        assert path.read_bytes() == whole  # which is written again


# Fields of the header, and values that they cannot have.
MALFORMED: list[Any] = [
    5, [1, 2, 3], {"token_ids": None}, {"token_ids": ["1"]}, {"token_ids": [1.5]}, {"starts": 5},
    {"arrays": []}, {"arrays": [5]}, {"arrays": [["<f4", [1] * 100]]}, {"arrays": [[None, [1]]]},
    {"arrays": [["<f4", [-130]]]}, {"arrays": [["<f4", [1 << 39]]]}, {"fill": "x" * (1 << 24)},
]  # fmt: skip


def test_malformed_headers(bundle: Path, path: Path, right: Any) -> None:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for value in MALFORMED:
        header = msgspec.msgpack.decode(whole[8:end])
        changed = msgspec.msgpack.encode(header | value if isinstance(value, dict) else value)
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[end:])
        assert taken(bundle, path.parent, IDS[:130]) == (0, right), value
        assert path.read_bytes() == whole


def test_keys_and_values_of_another_form_are_a_miss(
    bundle: Path, path: Path, right: Any, tmp_path: Path
) -> None:
    taken(bundle, tmp_path / "q", IDS[:130], kv="int8")
    (other,) = (tmp_path / "q").iterdir()
    path.write_bytes(other.read_bytes())
    assert taken(bundle, path.parent, IDS[:130]) == (0, right)


WRITER = """
import sys, time, stem_edge
from pathlib import Path
bundle, folder, ids = sys.argv[1], Path(sys.argv[2]), [*map(int, sys.argv[3:])]
for turn in range(1 << 30):
    with stem_edge.load(bundle, prompt_cache=folder, threads=1) as model:
        list(model.generate([turn % 3, *ids], max_new_tokens=1))
    print("ready", flush=True)
    time.sleep(0.02)
    for path in folder.glob("*.prefix"):
        path.unlink(missing_ok=True)
"""


def writer(bundle: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a process that writes and removes prompts for ever."""
    command = [sys.executable, "-c", WRITER, str(bundle), str(folder), *map(str, IDS[1:130])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@POSIX
@pytest.mark.slow
def test_killed_while_writing(bundle: Path, tmp_path: Path) -> None:
    for turn in range(6):
        process = writer(bundle, tmp_path / "p")
        time.sleep(0.02 + 0.026 * turn)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for first in range(3):
            count = again(bundle, tmp_path / "c", tmp_path / "p", [first, *IDS[1:130]])
            assert count in (0, 128)
    for temporary in (tmp_path / "p").glob(".*.tmp"):
        os.utime(temporary, (time.time() - 7200,) * 2)
    taken(bundle, tmp_path / "p", IDS)
    assert not list((tmp_path / "p").glob(".*.tmp"))


@pytest.mark.slow
def test_two_processes_use_one_folder(bundle: Path, tmp_path: Path) -> None:
    with stem_edge.load(bundle, threads=1) as model:
        prompts = [[first, *IDS[1:130]] for first in range(3)]
        expected = [answered(model, ids, max_new_tokens=4) for ids in prompts]
    process = writer(bundle, tmp_path / "p")
    try:
        seen, started = set[int](), time.monotonic()
        # The other process needs a while to start on a busy machine.
        while time.monotonic() < started + (5 if 128 in seen else 60):
            for ids, answer in zip(prompts, expected, strict=True):
                count, found = taken(bundle, tmp_path / "p", ids)
                assert found == answer
                seen.add(count)
        assert seen <= {0, 128} and 128 in seen
    finally:
        process.kill()
        process.communicate()

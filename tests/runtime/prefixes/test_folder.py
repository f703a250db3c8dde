"""Prefixes as files: what is found again, and what is a miss."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO
from loading import load_fixed
from prefix_files import IDS, Arrays, as_context, filled, found, prompt
from safetensors.numpy import load_file

from stem_edge.errors import InputError
from stem_edge.runtime.backends.context import PromptKey
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.engine import starts_of
from stem_edge.runtime.prefixes.file import PrefixFile, UnusableError, write_prefix
from stem_edge.runtime.prefixes.folder import PrefixFolder
from stem_edge.runtime.prefixes.opening import fingerprint


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint8])
def test_a_prompt_is_found_again(dtype: Any, tmp_path: Path) -> None:
    context = filled(dtype)
    PrefixFolder(tmp_path / "p", "this").write(prompt(IDS), 301, context)
    folder = PrefixFolder(tmp_path / "p", "this")
    assert found(folder, [*IDS[:300], *range(5000, 5060)], context) == 300
    assert found(folder, [*IDS[:151], 1, 2], context) == 150
    assert found(folder, IDS[:300], context) == 298
    assert found(folder, [*IDS[:100], 1, *IDS[101:]], context) == 0
    assert found(PrefixFolder(tmp_path / "p", "other"), IDS, context) == 0
    (path,) = (tmp_path / "p").iterdir()
    assert load_file(path)["0000"].shape == (2, 300, 4)
    if os.name == "posix":
        assert [item.stat().st_mode & 0o777 for item in (path, path.parent)] == [0o600, 0o700]


def test_a_longer_prompt_replaces_the_shorter_one(tmp_path: Path) -> None:
    folder, context = PrefixFolder(tmp_path / "p", "this"), filled()
    for count in (200, 300, 200, 260):
        folder.write(prompt(IDS[:count]), count, context)
    assert len(list((tmp_path / "p").iterdir())) == 1
    assert found(folder, IDS, context) == 300


def test_short_and_edited_prompts_are_not_written(tmp_path: Path) -> None:
    folder, context = PrefixFolder(tmp_path / "p", "this"), filled()
    folder.write(prompt(IDS[:100]), 100, context)
    folder.write(PromptKey(IDS, {50: ((7,),)}, [0]), 400, context)
    assert not (tmp_path / "p").exists()
    folder.write(PromptKey(IDS, {200: ((7,),)}, [0]), 400, context)
    assert found(PrefixFolder(tmp_path / "p", "this"), IDS, context) == 200


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    path, context = tmp_path / "p", filled()
    folder = PrefixFolder(path, "this", limit=50_000)  # a file of 200 tokens has about 14,000
    prompts = [[start, *IDS[:199]] for start in (1000, 2000, 3000, 4000)]
    for age, ids in enumerate(prompts[:3]):
        folder.write(prompt(ids), 200, context)
        for item in path.iterdir():
            os.utime(item, (item.stat().st_atime, item.stat().st_mtime - 100))
        assert age < 2 or found(folder, prompts[0], context)  # used last
    folder.write(prompt(prompts[3]), 200, context)
    fresh = PrefixFolder(path, "this")
    assert [bool(found(fresh, ids, context)) for ids in prompts] == [True, False, True, True]
    folder.write(prompt(IDS), 400, Arrays(tokens=10_000))  # type: ignore[arg-type]
    assert sum(item.stat().st_size for item in path.iterdir()) <= 50_000


def test_unfinished_files_are_removed_once_they_are_old(tmp_path: Path) -> None:
    folder, context = PrefixFolder(tmp_path, "this"), filled()
    new, old = f".{'0' * 16}.tmp", f".{'1' * 16}.tmp"
    for name, age in ((old, 7200), (new, 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    tmp_path.chmod(0o700)
    folder.write(prompt(IDS), 400, context)
    assert [path.name for path in tmp_path.glob(".*")] == [new]


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, "this", limit=50_000)
    key = folder._key
    names = ["model.safetensors", "notes.tmp", f".{'0' * 8}.tmp", f"{key}.safetensors"]
    names += [f"{key}-model.safetensors", f"{key}-{'a' * 32}.safetensors.part"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(60_000))
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    tmp_path.chmod(0o700)
    for start in (1000, 2000):
        folder.write(prompt([start, *IDS[:199]]), 200, filled())
    assert len(list(tmp_path.iterdir())) == len(names) + 2
    assert all((tmp_path / name).stat().st_size == 60_000 for name in names)
    assert len(PrefixFolder(tmp_path, "this")._files()) == 2


def test_the_same_ids_in_other_steps_replace_their_file(tmp_path: Path) -> None:
    for size in (128, 64, 128):
        folder = PrefixFolder(tmp_path / "p", "this")
        folder.write(PromptKey(IDS, {}, starts_of(400, size)), 400, filled())
        assert [kept.starts[1] for kept in folder._files().values()] == [size]
        assert len(list((tmp_path / "p").iterdir())) == 1


OTHER_FORMS: dict[str, Arrays] = {
    "another type": Arrays(np.float16),
    "another width": Arrays(),
    "more arrays": Arrays(),
}
OTHER_FORMS["another width"].views[1] = np.zeros((1, 1000, 4), np.float32)
OTHER_FORMS["more arrays"].views.append(np.zeros((1, 1000, 4), np.float32))


@pytest.mark.parametrize("kind", OTHER_FORMS)
def test_files_of_another_form_are_misses(kind: str, tmp_path: Path) -> None:
    PrefixFolder(tmp_path / "p", "this").write(prompt(IDS), 400, filled())
    folder = PrefixFolder(tmp_path / "p", "this")
    best = folder.find(prompt(IDS), "pairs", 0)
    assert best is not None
    assert not folder.read(*best, as_context(OTHER_FORMS[kind]))
    assert folder.find(prompt(IDS), "pairs", 0) is None
    assert found(PrefixFolder(tmp_path / "p", "this"), IDS, filled())  # and stay for others


def test_a_shorter_context_takes_the_first_tokens(tmp_path: Path) -> None:
    PrefixFolder(tmp_path / "p", "this").write(prompt(IDS), 400, filled())
    folder, short = PrefixFolder(tmp_path / "p", "this"), Arrays(tokens=200)
    best = folder.find(prompt(IDS[:198]), "pairs", 0)
    assert best is not None and best[1] == 196 and folder.read(*best, as_context(short))
    for view, expected in zip(short.kept(196), filled().kept(196), strict=True):
        assert (view == expected).all()


def test_a_header_alone_says_what_is_there(tmp_path: Path) -> None:
    saved = PromptKey(IDS, {}, [0, 128])
    write_prefix(tmp_path / "f", saved, filled().kept(400))
    with PrefixFile(tmp_path / "f") as file:
        assert file.prompt == saved and file.own
        assert all(map(np.array_equal, file.arrays(), filled().kept(400)))
    (tmp_path / "f").write_bytes(b"nothing of the kind")
    with pytest.raises(UnusableError):
        PrefixFile(tmp_path / "f")


def test_an_accelerator_has_no_prompt_cache(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompt_cache keeps prompts that"):
        load_fixed(DEMO, prompt_cache=tmp_path / "p", device_memory="2GB")


def test_what_keys_and_values_depend_on(engine: str, tiny: Path) -> None:
    fingerprints = list[str]()
    kv = "fp16" if engine == "ggml" else "int8"
    choices: list[Any] = [{}, {"kv": kv}, {"threads": 1}, {"weights": "stored"}, {}]
    for options in choices:
        given = {"threads": 2, "kv": "fp32"} | options
        with load_fixed(tiny, **given) as model:
            fingerprints.append(fingerprint(model.bundle, model.plan, LoadOptions(**given)))
    assert fingerprints[0] == fingerprints[4] and len(set(fingerprints)) == 4

"""Workloads: exact slices of a real text, and files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from installed import DEMO

from stem_edge.apps.measuring.workload import DEFAULT_TEXT, make_workload, read_ids
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import TextCodec

IDS = list(range(900))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(DEMO)


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.array(IDS))
    return tmp_path / "ids.npy"


def test_prompt_and_answer_are_slices_of_the_text(bundle: Bundle) -> None:
    text = TextCodec(bundle.file(TOKENIZER)).encode(DEFAULT_TEXT.read_text("utf-8"))
    found = make_workload(bundle, prompt_tokens=100, new_tokens=30)
    assert (found.prompt, found.following) == (text[:100], text[100:130])
    assert found.tokens == 130 and "inside this package" in found.source


@pytest.mark.parametrize(
    ("context", "expected"),
    [(2000, (512, 128)), (640, (512, 128)), (639, (512, 127)), (100, (80, 20)), (2, (1, 1))],
)
def test_sizes_shrink_to_the_context(
    bundle: Bundle, ids_file: Path, context: int, expected: tuple[int, int]
) -> None:
    found = make_workload(bundle, ids_file, context_length=context)
    assert (len(found.prompt), len(found.following)) == expected
    assert found.prompt + found.following == IDS[: found.tokens]
    assert found.source == str(ids_file)
    assert make_workload(bundle, ids_file).tokens == bundle.manifest.model.max_context


@pytest.mark.parametrize(
    ("prompt", "new", "context"),
    [
        *[(90, 11, 100), (100, None, 100), (None, 100, 100), (800, 101, 2000), (None, None, 1)],
        *[(0, 5, 100), (5, 0, 100), (-1, None, 100), (None, -1, 100), (None, None, 0)],
    ],
)
def test_numbers_that_do_not_fit(
    bundle: Bundle, ids_file: Path, prompt: int | None, new: int | None, context: int
) -> None:
    with pytest.raises(InputError) as raised:
        make_workload(bundle, ids_file, prompt, new, context)
    words = str(raised.value)
    assert "at least 1 of each" in words and "ask for fewer" in words and "\n" not in words
    assert f"{len(IDS)} tokens of {ids_file} and the {context} of the context" in words
    for name, number in (("prompt tokens", prompt), ("new ones", new)):
        assert number is None or re.search(rf"(^| ){number} {name}", words)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.uint64])
def test_files_of_ids(bundle: Bundle, tmp_path: Path, dtype: type[np.integer]) -> None:
    ids = np.array([5, 0, 1755], dtype)
    np.save(tmp_path / "a.npy", ids)
    ids.astype("<i4").tofile(tmp_path / "a.int32")
    assert read_ids(tmp_path / "a.npy", bundle) == read_ids(tmp_path / "a.int32", bundle)
    assert read_ids(tmp_path / "a.npy", bundle) == [5, 0, 1755]


NEITHER, NO_IDS = "neither a text in UTF-8 nor token ids in .npy or .int32", "no token ids found"
FOREIGN = "ids from {} to {}, the bundle has 0 to 1755; they belong to another"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "cannot read"),
        (".", None, "cannot read"),
        ("latin.txt", b"\xff\xfe123", NEITHER),
        ("cut.int32", b"\xff\xfe123", NEITHER),
        ("empty.npy", b"", NEITHER),
        ("archive.npy", [np.arange(3)], NEITHER),
        ("pickled.npy", np.array([{}]), NEITHER),
        ("empty.txt", b"", f"{NO_IDS}; expected a flat list"),
        ("empty.int32", b"", NO_IDS),
        ("no-ids.npy", np.ones(0, int), NO_IDS),
        ("floats.npy", np.ones(3), NO_IDS),
        ("matrix.npy", np.ones((2, 2), int), NO_IDS),
        ("scalar.npy", np.array(5), NO_IDS),
        ("negative.npy", np.array([-1, 5]), FOREIGN.format(-1, 5)),
        ("foreign.npy", np.array([5, 1756]), FOREIGN.format(5, 1756)),
        ("foreign.int32", np.array([70000], "<i4").tobytes(), FOREIGN.format(70000, 70000)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_hold_no_tokens_of_this_model(
    bundle: Bundle, tmp_path: Path, name: str, content: object, words: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif isinstance(content, list):
        with path.open("wb") as file:
            np.savez(file, *content)
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        read_ids(path, bundle)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)

"""Workloads: exact slices of a real text, and files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from installed import DEMO

from stem_edge.apps.measuring.workload import DEFAULT_TEXT, make_workload
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
    for name in ("a.npy", "a.int32"):
        found = make_workload(bundle, tmp_path / name, 2, 1)
        assert found.prompt + found.following == [5, 0, 1755]


UNREADABLE = "); give a text in UTF-8, or token ids as .npy or .int32"
FOUND = "expected a flat list of token ids from 0 to 1755; found "
NONE = FOUND + "none"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "cannot read"),
        (".", None, "cannot read"),
        ("latin.txt", b"\xff\xfe123", UNREADABLE),
        ("cut.int32", b"\xff\xfe123", UNREADABLE),
        ("empty.npy", b"", UNREADABLE),
        ("archive.npy", [np.arange(3)], UNREADABLE),
        ("pickled.npy", np.array([{}]), UNREADABLE),
        ("empty.txt", b"", NONE),
        ("empty.int32", b"", NONE),
        ("no-ids.npy", np.ones(0, int), NONE),
        ("floats.npy", np.ones(3), FOUND + "shape [3] of float64"),
        ("matrix.npy", np.ones((2, 3), int), FOUND + "shape [2, 3] of int64"),
        ("scalar.npy", np.array(5), FOUND + "shape [] of int64"),
        ("negative.npy", np.array([-1, 5]), FOUND + "-1 to 5"),
        ("foreign.npy", np.array([5, 1756]), FOUND + "5 to 1756"),
        ("foreign.int32", np.array([70000], "<i4").tobytes(), FOUND + "70000 to 70000"),
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
        make_workload(bundle, path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)

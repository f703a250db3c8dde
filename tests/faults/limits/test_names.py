"""Limits of names and JSON: just inside is accepted, just outside is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import takes

from stem_edge.files.names import check_names
from stem_edge.files.strict_json import check_depth, check_json, one_line
from stem_edge.tables import zarr_json

# Names


def long(*last: str) -> str:
    """Make a path of four parts of 204 bytes and a last one: 1,024 bytes if that has 204, too."""
    return "/".join(["a" * 204] * 4 + [*last])


GOOD = [
    *["a" * 255, "é" * 127 + "a", long("b" * 204), long("é" * 102), "con1", "com10", "a.aux", " a"],
    *[".a", "a/b", "a b", "console", "\u00e9", "模型/é", "/".join("abcdefgh")],
]
BAD = [
    *["a" * 256, "é" * 128, long("b" * 205), long("é" * 102 + "b"), "x" * 10**5],
    *["con", "CON.txt", "a/nul .b", "com0", "COM1", "lpt¹", "conin$", "conout$.x", "clock$", "prn"],
    *["aux.a.b", "...", "a.", "a ", "a./b", "a /b", "a//b", "a/./b", "a/../b", "..", ".", "", "/a"],
    *["//host/a", "a/", "a\\b", "a:b", "C:/a", "a<b", "a>b", 'a"b', "a|b", "a?b", "a*b"],
    # Names are printed: they must not steer the terminal or fake a line.
    *["a\0b", "a\nb", "a\x1b[2Jb", "a\x7fb", "a\x9bb", "a\u202egnp.x", "a\u200bb", "\ufeffa"],
    "e\u0301",  # not composed
]


@pytest.mark.parametrize("name", GOOD, ids=lambda name: ascii(name[:20]))
def test_names_that_every_system_takes(name: str) -> None:
    check_names([name, "other"])


@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name[:20]))
def test_names_that_are_no_plain_paths(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        check_names(["other", name])


@pytest.mark.parametrize(("count", "valid"), [(8192, True), (8193, False)])
def test_the_number_of_files(count: int, valid: bool) -> None:
    names = [str(number) for number in range(count)]
    if valid:
        check_names(names)
    else:
        with pytest.raises(ValueError, match="8193 files; expected at most 8192"):
            check_names(names)


# Strict JSON


@pytest.mark.parametrize(("depth", "valid"), [(32, True), (33, False)])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_the_depth_of_nesting(depth: int, valid: bool, brackets: str) -> None:
    opening, closing = brackets.encode("ascii")[:1], brackets.encode("ascii")[1:]
    some = opening * depth + closing * depth
    for data in (some, b"[" + some[1:-1] + b"]", b"x" + some * 3):
        if valid:
            check_depth(data)
        else:
            with pytest.raises(ValueError, match="at byte"):
                check_depth(data)


@pytest.mark.parametrize(
    "data",
    [b'["[[{{"]', rb'["\"[["]', rb'["\\", "[["]', b'"' + b"[" * 99, b'"' + b"[" * 99 + b"\\"],
)
def test_brackets_in_texts_do_not_count(data: bytes) -> None:
    check_depth(data * 32 if data.startswith(b"[") else data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"), (b" \n\t ", "empty"), (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', "utf-8"), (b'{"a": 1, "a": 1}', "'a' appears more than once"),
        (b'[{"b": {"c": 1, "d": 1, "c": 2}}]', "'c' appears more than once"),
        (b'{"a": 1', "delimiter"),
    ],
)  # fmt: skip
def test_what_is_no_strict_json(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_json(data)


def test_numbers_are_not_computed() -> None:
    """Python refuses to convert so many digits to int, and takes long for fewer."""
    check_json(b"[" + b"9" * 100_000 + b", 1e" + b"9" * 1000 + b"]")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x" * 300, "x" * 300), ("x" * 301, "x" * 300 + "..."), ("a\nb", "a b"),
        ("\x1b[2J", r"\x1b[2J"), ("é", "é"), (ValueError("no"), "no"),
    ],
)  # fmt: skip
def test_one_line(text: object, line: str) -> None:
    assert one_line(text) == line


# Files of JSON


def test_the_size_of_a_zarr_json(tmp_path: Path) -> None:
    def read(nbytes: int) -> None:
        (tmp_path / "zarr.json").write_bytes(b"{}".ljust(nbytes))
        assert zarr_json.read_json(tmp_path / "zarr.json") == {}

    takes(read, zarr_json.MAX_JSON_NBYTES, "larger than 1048576 bytes")

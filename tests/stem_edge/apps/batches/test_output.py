"""The file of results: what is cut is dropped, nothing else is lost, one process writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_disk import CHANGES, Failing, watch

from stem_edge.apps.batches.output import ResultFile
from stem_edge.errors import InputError

LINES = [
    b'{"id":"a","text":"1","finish_reason":"stop"}\n',
    b'{"id":2,"line":2,"error":{"message":"no"}}\n',
]


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", 0),
        (LINES[0], 1),
        (LINES[0] + LINES[1][:-1], 1),  # even what lacks its end alone
        (LINES[0] + LINES[1][:3], 1),
        *((line[:end], 0) for line in LINES for end in range(1, len(line))),
        (LINES[0] + bytes(9000), 1),  # as after a power cut
        (LINES[0] + LINES[1][:9] + bytes(90), 1),
        (LINES[0] + bytes(90) + LINES[1][9:-1], 1),
        (bytes(9000), 0),
        (b"".join(LINES), 2),
    ],
)
def test_a_cut_line_is_dropped(data: bytes, kept: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(data)
    with ResultFile(path) as found:
        assert len(found.keys) == kept
        assert found.append({"id": "new"})
        assert not found.append({"id": "new", "text": "again"})
    assert path.read_bytes() == b"".join(LINES[:kept]) + b'{"id":"new"}\n'


@pytest.mark.parametrize(
    "data",
    [
        *(b"text", b"text\n", b"{}\n", LINES[0] + b"\0\0\n" + LINES[1]),
        *(b'{"id": 1, "note": "mine"}', b'{"id":1,"note":"mine"}', b'{"id":1,"note":"mi'),
        *(b'{"id":1,"text":"mine"}', b'{"id":1,"text":"mine"}\n', LINES[0] + b'{"id": 1, "te'),
    ],
)
def test_other_files_stay_as_they_are(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(data)
    with pytest.raises(InputError, match="is no result of a batch"):
        ResultFile(path)
    assert path.read_bytes() == data


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out"), pytest.raises(InputError, match="another batch writes it"):
        ResultFile(tmp_path / "out")
    with ResultFile(tmp_path / "out"):
        pass


@pytest.mark.parametrize("at", range(5))
def test_a_failing_disk_loses_no_result(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"".join(LINES) + LINES[0][:5])
    with monkeypatch.context() as patch:
        failing = Failing(at, 28)
        watch(patch, CHANGES, failing)
        try:
            with ResultFile(path) as found:
                found.append({"id": "b", "finish_reason": "stop"})
        except InputError as error:
            assert "cannot write results (No space left on device)" in str(error)
        assert failing.failed == (at < 4), failing.count.names
    with ResultFile(path) as found:
        assert "a" in found.keys


def test_a_line_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"".join(LINES) + b'{"id":null,"line":4,"error":{}}\n')
    with ResultFile(path) as found:
        assert (found.keys, found.errors) == ({"a", 2, (4,)}, 2)

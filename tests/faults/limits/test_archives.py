"""Limits of torch.save archives: every number in them, at its limit and beyond."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_archives import PARTS, Changes, archive

from stem_edge.export.tensor_files import torch_zip
from stem_edge.export.tensor_files.stored_tensor import SourceFile
from stem_edge.export.tensor_files.torch_zip import Member, read_member, read_members

LONG = 0xFFFFFFFF


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Read an archive with other bytes around it in the file. Returns name -> contents."""

    def read(data: bytes, before: bytes = b"") -> dict[str, bytes]:
        (tmp_path / "x.pth").write_bytes(before + data + before)
        file = SourceFile(tmp_path / "x.pth")
        members = read_members(file, len(before), len(data))
        return {name: file.read(member.at, member.nbytes) for name, member in members.items()}

    return read


Read = Callable[..., dict[str, bytes]]
GOOD: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers in 64 bits": {"long": (0, 0, 0)},
    "numbers only in 64 bits": {
        "long": (0, 0, 0),
        "end": {"count": 0xFFFF, "size": LONG, "place": LONG},
    },
    "a size in 64 bits": {
        "entry": {"size": LONG, "packed": LONG, "place": LONG},
        "extra": struct.pack("<HH3Q", 1, 24, 8, 8, 30 + 10 + 3 + 6),
    },
    "a place in 64 bits, behind others": {
        "entry": {"place": LONG},
        "extra": struct.pack("<HHB", 7, 1, 0) + struct.pack("<HHQ", 1, 8, 49),
    },
    "an extra field of another kind": {"extra": struct.pack("<HHB", 2, 1, 0)},
    "half an extra field": {"extra": b"\1"},
    "a mode of nothing": {"entry": {"mode": 0}},
    "no checksum": {"entry": {"crc": 0}},
    "another flag": {"entry": {"flags": 8}, "local": {"flags": 8}},
    "one member": {"parts": {"a/data.pkl": b"x"}},
    "an empty member": {"parts": {"a/data.pkl": b"", "a/b": b""}},
}


@pytest.mark.parametrize("case", GOOD)
def test_archives_that_are_read(read: Read, case: str) -> None:
    made = archive(**GOOD[case])
    expected = GOOD[case].get("parts", PARTS)
    assert read(made) == expected
    assert read(made, before=b"other bytes") == expected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"end": {"mark": 0}}, "does not end as"),
    "a comment": ({"end": {"text": 1}}, "does not end as"),
    "a directory elsewhere": ({"end": {"place": 90}}, "its directory ends at byte"),
    "a shorter directory": ({"end": {"size": 90}}, "its directory ends at byte"),
    "other counts": ({"long": (1, 0, 0)}, "its two directories differ"),
    "other sizes": ({"long": (0, 1, 0)}, "its two directories differ"),
    "other places": ({"long": (0, 0, 1)}, "its two directories differ"),
    "a count in 64 bits": (
        {"long": (1 << 40, 0, 0), "end": {"count": 0xFFFF}},
        "claims 1099511627778 members",
    ),
    "a place in 64 bits": ({"long": (0, 0, 1 << 40), "end": {"place": LONG}}, "directory ends at"),
    "no long end": ({"long": (0, 0, 0), "locator": {"long": 0}}, "is not where its end says"),
    "a long end elsewhere": (
        {"long": (0, 0, 0), "locator": {"place": 0}},
        "is not where its end says",
    ),
    "a locator of another kind": ({"long": (0, 0, 0), "locator": {"mark": 0}}, "directory ends at"),
    "fewer members": ({"end": {"count": 1}}, "stray bytes follow its directory"),
    "more members": ({"end": {"count": 3}}, "its directory is short"),
    "half an entry": ({"end": {"count": 3}, "stray": b"PK\1\2" + bytes(41)}, "directory is short"),
    "another mark": ({"end": {"count": 3}, "stray": b"PK\1\3" + bytes(42)}, "outside|is damaged"),
    "another mark of a name": (
        {"end": {"count": 3}, "stray": b"PK\1\3" + bytes(24) + b"\1" + bytes(17) + b"x"},
        "directory is damaged",
    ),
    "a name beyond the directory": ({"entry": {"name": 9}}, "directory is damaged"),
    "an extra field beyond it": ({"entry": {"extra": 1}}, "directory is damaged"),
    "stray bytes": ({"stray": b"x"}, "1 stray bytes follow"),
    "compressed": ({"entry": {"method": 8}}, "is compressed"),
    "packed": ({"entry": {"packed": 7}}, "is compressed"),
    "encrypted": ({"entry": {"flags": 1}}, "encrypted or a link"),
    "encrypted there": ({"local": {"flags": 1}}, "is not where the directory says"),
    "compressed there": ({"local": {"method": 8}}, "is not where the directory says"),
    "another mark there": ({"local": {"mark": 0x04034B51}}, "is not where the directory says"),
    "a link": ({"entry": {"mode": 0o120777}}, "encrypted or a link"),
    "a place behind all": ({"entry": {"place": 1 << 20}}, "after all members"),
    "a longer name there": ({"local": {"name": 9}}, "a/data/0 ends at byte"),
    "a longer extra field there": ({"local": {"extra": 4}}, "a/data/0 ends at byte"),
    "another size": ({"entry": {"size": 9, "packed": 9}}, "a/data/0 ends at byte"),
    "a size that is nowhere": ({"entry": {"size": LONG, "packed": LONG}}, "a/data/0 ends at byte"),
    "another size in 64 bits": (
        {"entry": {"size": LONG}, "extra": struct.pack("<HHQ", 1, 8, 9)},
        "is compressed",
    ),
    "the same place": ({"entry": {"place": 0}}, "members overlap"),
    "the first bytes": ({"parts": {}}, "an empty zip archive"),
}


# Numbers of a member, and the extra field that should hold its sizes in 64 bits.
WITHOUT_SIZE: dict[str, tuple[Changes, bytes]] = {
    "a size of too few bytes": ({"size": LONG}, struct.pack("<HHI", 1, 4, 8)),
    "sizes of too few bytes": ({"size": LONG, "packed": LONG}, struct.pack("<HHQ", 1, 8, 8)),
    "a size beyond the field": ({"size": LONG}, struct.pack("<HHI", 1, 8, 8)),
    "an empty field": ({"size": LONG, "packed": LONG}, struct.pack("<HH", 1, 0)),
}
BAD |= {
    case: ({"entry": entry, "extra": extra}, "a member has no size")
    for case, (entry, extra) in WITHOUT_SIZE.items()
}


@pytest.mark.parametrize("case", BAD)
def test_c16_archives_that_torch_does_not_write(read: Read, case: str) -> None:
    """Links, devices and paths are harmless, because no member is ever unpacked into a file."""
    options, said = BAD[case]
    made = archive(**options)
    for before in (b"", b"other bytes"):
        with pytest.raises(ValueError, match=said):
            read(made, before)


NAMES: dict[str, bool] = {
    "a/" + "x" * 1022: True,
    "a/" + "x" * 1023: False,
    "x": True,
    "": False,
    ".": False,
    "a/..": False,
    "a//b": False,
    "/a": False,
    "a/": False,
    "a/...": True,
    "a\\b": False,
    "a\nb": False,
    "é": True,
    "\udcff": False,  # a byte that is no UTF-8
}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names(read: Read, name: str) -> None:
    parts = {"a/data.pkl": b"x", name: b"y"}
    if NAMES[name]:
        assert read(archive(parts)) == parts
    else:
        with pytest.raises(ValueError):
            read(archive(parts))


def test_the_number_of_members(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_zip.MAX_MEMBERS == 262_144
    monkeypatch.setattr(torch_zip, "MAX_MEMBERS", 2)
    assert read(archive()) == PARTS
    with pytest.raises(ValueError, match="claims 3 members"):
        read(archive({**PARTS, "a/c": b""}))
    monkeypatch.setattr(torch_zip, "MAX_MEMBERS", 3)
    most = 2 * (46 + 2 * 1024)
    padding = most - len(archive(stray=b"")) + archive().index(b"PK\1\2") + 22
    with pytest.raises(ValueError, match="stray bytes"):
        read(archive(stray=bytes(padding)))
    with pytest.raises(ValueError, match=f"claims 2 members in {most + 1} bytes"):
        read(archive(stray=bytes(padding + 1)))


def test_short_files(read: Read) -> None:
    for size in (0, 4, 21, 22, 97, 98):
        made = archive()[: max(0, size - 22)] + archive({})
        with pytest.raises(ValueError):
            read(b"PK\3\4" + made[4:size] if size else b"")
    smallest = archive({"x": b""})
    assert read(smallest) == {"x": b""}


def test_small_members_are_compared_with_their_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"..12345678..")
    file, crc = SourceFile(tmp_path / "x"), zlib.crc32(b"12345678")
    assert read_member(file, Member(2, 8, crc), 8) == b"12345678"
    assert read_member(file, Member(2, 8, 0), 8) == b"12345678"
    with pytest.raises(ValueError, match="a member has 8 bytes; expected up to 7"):
        read_member(file, Member(2, 8, crc), 7)
    with pytest.raises(ValueError, match="checksum at byte 2 does not match"):
        read_member(file, Member(2, 8, crc ^ 1), 8)

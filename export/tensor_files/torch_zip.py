"""Reader of torch.save's zip archives, which store members without compression.

Only what torch writes is accepted: no compression, no encryption, no comment or other bytes before
or after the archive, every member within it and none over another. So no member can grow, lead
elsewhere, or be read differently by another tool.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from stem_edge.export.tensor_files.stored_tensor import ZIP, SourceFile, looks_like

MAX_MEMBERS = 1 << 18
MAX_NAME_NBYTES = 1024
# The names of these in PKWARE's APPNOTE.TXT follow each.
END = struct.Struct("<4s4H2IH")  # end of central directory record
LONG_END = struct.Struct("<4sQ2H2I4Q")  # zip64 end of central directory record, before it
LOCATOR = struct.Struct("<4sIQI")  # zip64 end of central directory locator, between the two
ENTRY = struct.Struct("<4s6H3I5H2I")  # central directory header
LOCAL = struct.Struct("<4s5H3I2H")  # local file header
LONG = 0xFFFFFFFF  # the number is in the zip64 extra field, because it needs 64 bits
ENCRYPTED, STORED, LINK, ZIP64 = 1, 0, 0o120000, 1
DAMAGED = "the file is truncated or was changed"


class Member(NamedTuple):
    """Part of an archive."""

    at: int  # byte of the file
    nbytes: int
    crc32: int  # 0: torch was set not to compute it


def read_members(file: SourceFile, start: int, nbytes: int) -> dict[str, Member]:
    """Return name -> member of the archive in these bytes of the file. Raises ValueError."""
    head = file.read(start, min(512, nbytes))
    if not head.startswith(ZIP):
        what = looks_like(head) or f"bytes {head[:8].hex(' ') or 'none'}"
        raise ValueError(f"it is {what}, not an archive of torch.save")
    directory, count, end = _directory(file, start, nbytes)
    members: dict[str, Member] = {}
    for name, member in _entries(directory, count):
        if name in members:
            raise ValueError(f"it has two members {name}")
        members[name] = _placed(file, start, end, name, member)
    at = start
    for member in sorted(members.values()):
        if member.at < at:
            raise ValueError(f"members overlap at byte {member.at}")
        at = member.at + member.nbytes
    return members


def read_member(file: SourceFile, member: Member, limit: int) -> bytes:
    """Read a small member and compare its checksum. Raises ValueError."""
    if member.nbytes > limit:
        raise ValueError(f"a member has {member.nbytes} bytes; expected up to {limit}")
    data = file.read(member.at, member.nbytes)
    if member.crc32 and zlib.crc32(data) != member.crc32:
        raise ValueError(f"the checksum at byte {member.at} does not match; {DAMAGED}")
    return data


def _directory(file: SourceFile, start: int, nbytes: int) -> tuple[bytes, int, int]:
    """Read the central directory; return it, its number of members, and the byte where they end."""
    at = start + nbytes - END.size
    if nbytes < END.size:
        raise ValueError(f"it has {nbytes} bytes; {DAMAGED}")
    end = END.unpack(file.read(at, END.size))
    if end[0] != b"PK\x05\x06" or end[-1]:
        raise ValueError(f"it does not end as an archive of torch.save does; {DAMAGED}")
    count, size, offset = end[4], end[5], end[6]
    if (long := _long_end(file, start, at)) is not None:
        at -= LOCATOR.size + LONG_END.size
        short = (0xFFFF, LONG, LONG)  # for numbers that do not fit; others must be equal in both
        if any(a not in (b, c) for a, b, c in zip(end[4:7], long, short, strict=True)):
            raise ValueError(f"its two directories differ; {DAMAGED}")
        count, size, offset = long
    if count > MAX_MEMBERS or size > count * (ENTRY.size + 2 * MAX_NAME_NBYTES):
        raise ValueError(f"it claims {count} members in {size} bytes; {DAMAGED}")
    if start + offset + size != at:
        raise ValueError(f"its directory ends at byte {offset + size}, not {at - start}; {DAMAGED}")
    return file.read(start + offset, size), count, start + offset


def _long_end(file: SourceFile, start: int, end: int) -> tuple[int, int, int] | None:
    """Read count, size and offset of the directory in zip64's form; None if the file has no such form."""
    at = end - LOCATOR.size - LONG_END.size
    if at < start:
        return None
    data = file.read(at, LOCATOR.size + LONG_END.size)
    long, locator = LONG_END.unpack_from(data), LOCATOR.unpack_from(data, LONG_END.size)
    if locator[0] != b"PK\x06\x07":
        return None
    if long[0] != b"PK\x06\x06" or start + locator[2] != at:
        raise ValueError(f"its directory is not where its end says; {DAMAGED}")
    return long[7], long[8], long[9]


def _entries(directory: bytes, count: int) -> Iterator[tuple[str, Member]]:
    """Yield the members by name, with `at` of their local headers."""
    at = 0
    for _ in range(count):
        if at + ENTRY.size > len(directory):
            raise ValueError(f"its directory is short; {DAMAGED}")
        entry = ENTRY.unpack_from(directory, at)
        flags, method, crc32, packed, size = entry[3], entry[4], *entry[7:10]
        lengths, mode, place = entry[10:13], entry[15] >> 16, entry[16]
        at += ENTRY.size
        name = _checked_name(directory[at : at + lengths[0]])
        extra = directory[at + lengths[0] : at + lengths[0] + lengths[1]]
        at += sum(lengths)
        if entry[0] != b"PK\x01\x02" or at > len(directory):
            raise ValueError(f"its directory is damaged; {DAMAGED}")
        size, packed, place = _long(extra, size, packed, place)
        if method != STORED or packed != size:
            raise ValueError(f"the member {name} is compressed, which torch.save never does")
        if flags & ENCRYPTED or mode & 0o170000 == LINK:
            raise ValueError(f"the member {name} is encrypted or a link")
        yield name, Member(place, size, crc32)
    if at != len(directory):
        raise ValueError(f"{len(directory) - at} stray bytes follow its directory")


def _checked_name(data: bytes) -> str:
    name = data.decode("utf-8")
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or len(data) > MAX_NAME_NBYTES:
        raise ValueError(f"a member has the name {name[:80]!a}")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"the member {name[:80]} would lie outside of the archive")
    return name


def _long(extra: bytes, *values: int) -> list[int]:
    """Replace numbers that did not fit into 32 bits by the numbers of the zip64 extra field, in order."""
    found, at = list(values), 0
    while LONG in found and at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64:
            for number, value in enumerate(found):
                if value == LONG:
                    if at + 12 > len(extra) or size < 8:
                        raise ValueError(f"a member has no size; {DAMAGED}")
                    found[number] = struct.unpack_from("<Q", extra, at + 4)[0]
                    at, size = at + 8, size - 8
            return found
        at += 4 + size
    return found


def _placed(file: SourceFile, start: int, end: int, name: str, member: Member) -> Member:
    """Check a member's local header; return the member with `at` of its first byte."""
    at = start + member.at
    if at + LOCAL.size > end:
        raise ValueError(f"the member {name} begins at byte {at}, after all members; {DAMAGED}")
    local = LOCAL.unpack(file.read(at, LOCAL.size))
    at += LOCAL.size + local[9] + local[10]
    if local[0] != ZIP or local[2] & ENCRYPTED or local[3] != STORED:
        raise ValueError(f"the member {name} is not where the directory says; {DAMAGED}")
    if at + member.nbytes > end:
        raise ValueError(
            f"the member {name} ends at byte {at + member.nbytes}, the members at {end}; {DAMAGED}"
        )
    return member._replace(at=at)

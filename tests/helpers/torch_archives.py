"""Build archives like those of torch.save, with changes to any number in them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

PARTS = {"a/data.pkl": b"pickle", "a/data/0": b"12345678"}
Changes = dict[str, int]


def archive(
    parts: Mapping[str, bytes] = PARTS,
    entry: Changes = {},  # noqa: B006
    local: Changes = {},  # noqa: B006
    end: Changes = {},  # noqa: B006
    extra: bytes = b"",
    long: tuple[int, int, int] | None = None,
    locator: Changes = {},  # noqa: B006
    stray: bytes = b"",
) -> bytes:
    """Build an archive; `entry` and `local` change numbers of the last member.

    long: errors of the directory's count, size and offset in a 64-bit end record, if there is one.
    """
    data, directory = b"", b""
    for name, content in parts.items():
        last = name == list(parts)[-1]
        change, text = (entry if last else {}), name.encode(errors="surrogateescape")
        crc, size, more = zlib.crc32(content), len(content), extra if last else b""
        fields = {"flags": 0, "method": 0, "packed": size, "size": size, "place": len(data)}
        f = fields | {"mode": 0o100644, "name": len(text), "extra": len(more), "crc": crc} | change
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, f["flags"], f["method"], 0, 0, f["crc"], f["packed"],
            f["size"], f["name"], f["extra"], 0, 0, 0, f["mode"] << 16, f["place"],
        ) + text + more  # fmt: skip
        of = {"mark": 0x04034B50, "flags": 0, "method": 0, "name": len(text), "extra": 3}
        of |= local if last else {}
        data += struct.pack(
            "<I5H3I2H", of["mark"], 20, of["flags"], of["method"], 0, 0, crc, size, size,
            of["name"], of["extra"],
        ) + text + b"pad" + content  # fmt: skip
    directory += stray
    e = {"mark": 0x06054B50, "count": len(parts), "size": len(directory), "place": len(data)} | end
    found = data + directory
    if long is not None:
        numbers = [
            a + b for a, b in zip((len(parts), len(directory), len(data)), long, strict=True)
        ]
        where = {"mark": 0x07064B50, "long": 0x06064B50, "place": len(found)} | locator
        found += struct.pack("<IQ2H2I4Q", where["long"], 44, 45, 45, 0, 0, numbers[0], *numbers)
        found += struct.pack("<IIQI", where["mark"], 0, where["place"], 1)
    return found + struct.pack(
        "<I4H2IH", e["mark"], 0, 0, e["count"], e["count"], e["size"], e["place"], e.get("text", 0)
    )

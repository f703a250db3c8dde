"""What a file is by its first bytes, for saying so when something else was expected."""

from __future__ import annotations

HEAD_NBYTES = 512
ZIP = b"PK\x03\x04"
TAR_AT = 257  # where a tar archive says that it is one
_HEADS = {
    ZIP: "a zip archive (torch's .pth and .pt, numpy's .npz, or any other)",
    b"PK\x05\x06": "an empty zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstandard archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "an array of numpy",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"#!": "a program",
    b"version https://git-lfs": "the pointer that git-lfs leaves in place of a file",
    b"<": "a page of a web site",
}


def looks_like(head: bytes) -> str | None:
    """Of a file that begins with these bytes; None if they are nothing that is known."""
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return "a tar archive"
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a bare pickle, which can carry code"
    return next((what for start, what in _HEADS.items() if head.startswith(start)), None)

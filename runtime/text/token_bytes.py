"""Converts a token's name in a vocabulary to bytes."""

from __future__ import annotations

import re

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of sentencepiece for one byte


def _bytes_of_chars() -> dict[str, int]:
    """Return GPT-2's map from characters in byte-level token names to bytes.

    Printable characters stand for themselves, characters from U+0100 on for the other bytes.
    """
    printing = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(0x100) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


BYTES_OF_CHARS = _bytes_of_chars()


def bytes_of(name: str, *, byte_level: bool) -> bytes:
    """Return the bytes of the token `name`. byte_level: names use GPT-2's characters for bytes."""
    if byte_level and BYTES_OF_CHARS.keys() >= set(name):
        return bytes(BYTES_OF_CHARS[char] for char in name)
    if (byte := _BYTE.fullmatch(name)) is not None:
        return bytes([int(byte[1], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

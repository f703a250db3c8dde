"""Mutators of each kind of file: valid input in, input that is nearly valid out.

Checksums are made to fit again, most of the time: else no mutant would come past them. Input of
several files is one run of bytes, see `join`.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import PurePosixPath
from random import Random
from typing import TypeAlias

import google_crc32c
from fuzz_bytes import border, mutate_bytes, packed
from fuzz_json import mutate_json

Mutator: TypeAlias = Callable[[bytes, bytes, Random], bytes]
CRC_NBYTES = 4
PART = re.compile(rb"== ([a-z_./0-9]{1,80}) (\d{1,9})\n")
EDIT = re.compile(rb'"sha256": *"([0-9a-f]*)", *"edit": *(.*)\}\n?$', re.DOTALL)


def _mostly(first: Mutator, share: float = 0.85) -> Mutator:
    """The mutator, or now and then, and where it cannot, one of bytes."""

    def mutate(data: bytes, other: bytes, rng: Random) -> bytes:
        if rng.random() < share:
            try:
                return first(data, other, rng)
            except (ValueError, struct.error, UnicodeError):
                pass
        return mutate_bytes(data, other, rng)

    return mutate


json_file = _mostly(mutate_json)
text_file: Mutator = mutate_bytes


def join(files: dict[str, bytes]) -> bytes:
    """Several files in one: of each `== NAME SIZE`, a line, and its bytes."""
    return b"".join(f"== {name} {len(data)}\n".encode() + data for name, data in files.items())


def split(data: bytes) -> dict[str, bytes]:
    """The files in one; what does not parse is left out."""
    files, at = {}, 0
    while head := PART.match(data, at):
        at = head.end() + int(head[2])
        files[head[1].decode()] = data[head.end() : at]
    return files


def _store(data: bytes, other: bytes, rng: Random) -> bytes:
    """A table store with one or two files changed."""
    files, donors = split(data), split(other)
    if not files:
        raise ValueError("no files")
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice(sorted(files))
        donor = donors.get(name, files[name])
        if PurePosixPath(name).suffix == ".json":
            files[name] = json_file(files[name], donor, rng)
        elif "index" in name:
            files[name] = _sealed(files[name], donor, rng)
        else:
            files[name] = _shard(files[name], donor, rng)
    if rng.randrange(40) == 0:
        del files[rng.choice(sorted(files))]
    return join(files)


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CRC_NBYTES, "little")


def _sealed(data: bytes, other: bytes, rng: Random) -> bytes:
    """Changed bytes with the right checksum at their end."""
    body = bytearray(data[:-CRC_NBYTES])
    if len(body) >= 4 and rng.randrange(3):
        at = rng.randrange(len(body) // 4) * 4
        body[at : at + 4] = packed(border(rng, body[at]), "I")
        changed = bytes(body)
    else:
        changed = mutate_bytes(bytes(body), other, rng)
    return changed + (_crc(changed) if rng.randrange(8) else data[-CRC_NBYTES:])


def _shard(data: bytes, other: bytes, rng: Random) -> bytes:
    """A shard with other bytes, or with another index whose checksum is right."""
    places = [at for at in range(0, len(data) - 12, 4) if data[at : at + 8] == b"\0" * 8]
    if not places or rng.randrange(2):
        return mutate_bytes(data, other, rng)
    index = bytearray(data[places[-1] : -CRC_NBYTES])
    if len(index) >= 8:
        at = rng.randrange(len(index) // 8) * 8
        old = int.from_bytes(index[at : at + 8], "little")
        index[at : at + 8] = packed(border(rng, old), "Q")
    return data[: places[-1]] + bytes(index) + _crc(bytes(index))


def _edit(data: bytes, other: bytes, rng: Random) -> bytes:
    """An edit file whose edit was changed; its checksum is right, most of the time."""
    found, donor = EDIT.search(data), EDIT.search(other)
    if found is None or rng.randrange(6) == 0:
        return json_file(data, other, rng)
    content = json_file(found[2], donor[2] if donor else found[2], rng)
    digest = found[1] if rng.randrange(10) == 0 else hashlib.sha256(content).hexdigest().encode()
    return data[: found.start(1)] + digest + b'", "edit": ' + content + b"}\n"


def _safetensors(data: bytes, other: bytes, rng: Random) -> bytes:
    """A file whose header was changed; its length is right, most of the time."""
    (length,) = struct.unpack_from("<Q", data)
    (donor,) = struct.unpack_from("<Q", other)
    header = json_file(data[8 : 8 + length], other[8 : 8 + donor], rng)
    number = border(rng, len(header)) if rng.randrange(8) == 0 else len(header)
    return packed(number, "Q") + header + data[8 + length :]


def template_text(data: bytes, other: bytes, rng: Random) -> bytes:
    """A template in which tokens of the language were moved, doubled, dropped or exchanged."""
    words = re.findall(rb"\w+|\s+|\{[%{#]-?|-?[%}#]\}|.", data, re.DOTALL)
    pool = re.findall(rb"\w+|\{[%{#]-?|-?[%}#]\}|.", other, re.DOTALL) + TEMPLATE_WORDS
    if not words or rng.randrange(8) == 0:
        return mutate_bytes(data, other, rng)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(words) + 1)
        end = min(len(words), at + rng.choice([1, 1, 4, 16]))
        piece = words[at:end]
        words[at:end] = rng.choice(
            [
                [],
                piece * 2,
                piece * rng.choice([8, 64]),
                piece[::-1],
                [rng.choice(pool)],
                [*piece, rng.choice(pool)],
                [b"(" * 50, *piece, b")" * 50],
            ]
        )
    return b"".join(words)


TEMPLATE_WORDS = [
    b"{% for a in messages %}", b"{% endfor %}", b"{% if a %}", b"{% endif %}", b"{{ a.content }}",
    b"range(10**9)", b"'a' * 999999999", b"__class__", b"|attr('x')", b"|map('upper')|list|join",
    b"{% set x = 1 %}", b"{% macro m() %}", b"{% endmacro %}", b"{% include 'x' %}",
    b"{% import 'x' as y %}", b"{% extends 'x' %}", b"cycler.__init__.__globals__", b"**", b"//", b"~",
    b"loop", b"namespace(a=1)", b"raise_exception('x')", b"1" * 5000, b"lipsum(9)", b"\xff",
    b"{{ ''.join(['a'] * 9) }}", b"{% raw %}", b"{% call m() %}", b"{# ", b" #}", b"none", b".format",
]  # fmt: skip


def _tokenizer_config(data: bytes, other: bytes, rng: Random) -> bytes:
    """tokenizer_config.json, whose template is changed as one."""
    if rng.randrange(3) == 0:
        return json_file(data, other, rng)
    try:
        config, donor = json.loads(data), json.loads(other)
        texts = [config["chat_template"].encode(), donor["chat_template"].encode()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no template") from error
    text = template_text(texts[0], texts[1], rng).decode(errors="replace")
    return json.dumps(config | {"chat_template": text}).encode()


store_files = _mostly(_store, 0.97)
edit_file = _mostly(_edit, 0.97)
safetensors_file = _mostly(_safetensors)
tokenizer_config = _mostly(_tokenizer_config)

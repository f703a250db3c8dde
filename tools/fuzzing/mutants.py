"""Mutate valid files of each kind into nearly valid ones.

Checksums and lengths are corrected most of the time, because readers check them first, and would
refuse every mutant otherwise. `join` packs several files into one input.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import TypeAlias

import google_crc32c

MAX_NBYTES = 1 << 16
MOST_CHANGES = 8  # in a row, from one seed
CRC_NBYTES = 4
BORDERS = [0, 1, 2, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536]
BORDERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
PART = re.compile(rb"== ([a-z_./0-9]{1,80}) (\d{1,9})\n")
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|[\[\]{}]')
COLON = re.compile(rb"\s*:\s*")
WORD = re.compile(rb"\w+|\s+|\{[%{#]-?|-?[%}#]\}|.", re.DOTALL)
NUMBERS = (
    "-0 0.0 0.5 1e3 1e-9 1e308 1e400 -1e400 5e-324 NaN Infinity -Infinity 1e 01 0x10 1_000 +1 1."
)
OTHERS = 'true false null nul [] {} [[]] "" [1] {"a":1} "\\ud800"'
TEXTS = ["../x", "/etc/passwd", "C:\\x", "a//b", "./a", "con", "\0", "\x1b[31m", "\u202e", "\ufeff"]
TEXTS += ["e\u0301", "f" * 64, "x" * 5000, "int4", "fp16", "stem", "{{ x }}"]
VALUES = [*NUMBERS.split(), *OTHERS.split(), *map(str, BORDERS), str(2**64), str(-(2**63))]
VALUES += ["9" * 400, "1" + "0" * 5000, "", *map(json.dumps, TEXTS)]
TEMPLATE_WORDS = [
    b"{% for a in messages %}", b"{% endfor %}", b"{% if a %}", b"{% endif %}", b"{{ a.content }}",
    b"range(10**9)", b"'a' * 999999999", b"__class__", b"|attr('x')", b"|map('upper')|list|join",
    b"{% set x = 1 %}", b"{% macro m() %}", b"{% endmacro %}", b"{% include 'x' %}",
    b"{% import 'x' as y %}", b"{% extends 'x' %}", b"cycler.__init__.__globals__", b"**", b"//", b"~",
    b"loop", b"namespace(a=1)", b"raise_exception('x')", b"1" * 5000, b"lipsum(9)", b"\xff", b"(" * 50,
    b"{{ ''.join(['a'] * 9) }}", b"{% raw %}", b"{% call m() %}", b"{# ", b" #}", b"none", b".format",
]  # fmt: skip
ANSWER_WORDS = [
    b"<tool_call>", b"</tool_call>", b"<function=", b"</function>", b"<parameter=", b"</parameter>",
    b"<|tool_call>", b"<tool_call|>", b'<|"|>', b"<start_function_call>", b"<end_function_call>", b"<escape>",
    b"<|tool_call_start|>", b"<|tool_call_end|>", b"<|python_tag|>", b"<|python_start|>", b"call:now{",
    b"weather(", b"now(", b'{"name": "now", "arguments": ', b'"parameters": ', b"city", b"days", b"deep",
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\\ud800", b"\\", b'"', b"'", b"None", b"True", b"null",
    b"[" * 300, b'{"a":' * 300, b"; ", b"\n", b",", b"=", b"\x00", b"\xff", "é".encode(),
]  # fmt: skip


# (random, file, another file of its kind to take pieces from) -> mutant. May raise anything for a file
# that an earlier change has broken.
Change: TypeAlias = Callable[[Random, bytes, bytes], bytes]


def mutate(change: Change, random: Random, data: bytes, other: bytes) -> bytes:
    """Apply a change; if the file is already too broken for it, change some bytes instead."""
    try:
        found = change(random, data, other)
    except Exception:  # json, struct, zipfile and indexing each raise their own
        found = change_bytes(random, data, other)
    return found[:MAX_NBYTES]


def mutants(change: Change, random: Random, seeds: Sequence[bytes]) -> Iterator[bytes]:
    """Yield mutants without end: change one seed up to 8 times in a row, then another seed."""
    while True:
        data = random.choice(seeds)
        for _ in range(random.choice([1, 1, 1, 2, 3, MOST_CHANGES])):
            data = mutate(change, random, data, random.choice(seeds))
            yield data


def change_bytes(random: Random, data: bytes, other: bytes) -> bytes:
    """Overwrite, insert or delete some bytes."""
    at, start = random.randrange(len(data) + 1), random.randrange(len(other) + 1)
    length = random.choice([0, 1, 4, 8, 16, 64, 1024])
    here, there = data[at : at + length], other[start : start + length]
    made = random.choice([_number(random), random.randbytes(random.randrange(17))])
    piece = random.choice([made, made, here, there, b""])
    gone = random.choice([0, length, len(piece)])
    return data[:at] + piece + data[at + gone :]


def _number(random: Random) -> bytes:
    """Encode an unsigned number, truncated to 1, 2, 4 or 8 bytes."""
    nbytes = random.choice([1, 2, 4, 8])
    number = random.choice([random.choice(BORDERS), random.getrandbits(64)])
    return (number % (1 << 8 * nbytes)).to_bytes(nbytes, random.choice(["little", "big"]))


def change_json(random: Random, data: bytes, other: bytes) -> bytes:
    """Replace, repeat, nest or delete a name, a value or a name-value pair of a JSON text."""
    start, end = random.choice(_spans(data))
    old, depth = data[start:end], random.choice([1, 31, 32, 33, 100, 2000])
    value = random.choice([_similar(random, old), random.choice(VALUES).encode()])
    taken = other[slice(*random.choice(_spans(other)))]
    repeated = b",".join([old] * random.choice([2, 3, 9, 40]))
    nested = b"[" * depth + old + b"]" * depth
    new = random.choice([value, value, taken, repeated, nested, b""])
    rest = data[end:] if new else data[end:].lstrip().removeprefix(b",")
    return data[:start] + new + rest


def _similar(random: Random, old: bytes) -> bytes:
    """Return a new JSON value: an integer or a text if the old value is one, else a float."""
    if old.isdigit() and len(old) < 20:
        change = random.choice([-1, 1, random.getrandbits(random.choice([4, 31, 60]))])
        return b"%d" % max(0, int(old) + change)
    if old.startswith(b'"'):
        letters = (chr(random.randrange(random.choice([127, 0x2FFF]))) for _ in range(12))
        return json.dumps("".join(letters)[: random.randrange(12)]).encode()
    return repr(random.lognormvariate(0, 9)).encode()


@lru_cache(maxsize=1000)
def _spans(data: bytes) -> list[tuple[int, int]]:
    """Return (start, end) of each name, each value and each name-value pair in a JSON text."""
    found, opened = [], []
    for match in TOKEN.finditer(data):
        if match[0] in (b"[", b"{"):
            opened.append(match.start())
        elif match[0] not in (b"]", b"}"):
            found.append(match.span())
        elif opened:
            found.append((opened.pop(), match.end()))
    end_of = dict(found)
    colons = ((start, COLON.match(data, end)) for start, end in found)
    return found + [(a, end_of[c.end()]) for a, c in colons if c is not None and c.end() in end_of]


def join(files: dict[str, bytes]) -> bytes:
    """Pack several files into one: for each a line `== NAME SIZE` and its bytes."""
    return b"".join(f"== {name} {len(data)}\n".encode() + data for name, data in files.items())


def split(data: bytes) -> dict[str, bytes]:
    """Unpack what `join` packed, up to the first line that does not parse."""
    files, at = {}, 0
    while head := PART.match(data, at):
        at = head.end() + int(head[2])
        files[head[1].decode()] = data[head.end() : at]
    return files


def change_store(random: Random, data: bytes, other: bytes) -> bytes:
    """Change one file of a table store, or delete it."""
    files, donors = split(data), split(other)
    name = random.choice(sorted(files))
    change = change_json if name.endswith(".json") else _change_index
    files[name] = change(random, files[name], donors.get(name, files[name]))
    if random.random() < 0.02:
        del files[name]
    return join(files)


def _change_index(random: Random, data: bytes, other: bytes) -> bytes:
    """Change a shard: its index (then the checksum is corrected), or any of its bytes."""
    sums = (n for n in range(4, len(data) - 3, 4) if _crc(data[-4 - n : -4]) == data[-4:])
    nbytes = next(sums, 0)
    if not nbytes or random.random() < 0.5:
        return change_bytes(random, data, other)
    start = len(data) - CRC_NBYTES - nbytes
    changed = change_bytes(random, data[start:-CRC_NBYTES], other)
    return data[:start] + changed + _crc(changed)


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CRC_NBYTES, "little")


def change_safetensors(random: Random, data: bytes, other: bytes) -> bytes:
    """Change the header of a safetensors file; its length is correct most of the time."""
    ((length,), (donor,)) = struct.unpack_from("<Q", data), struct.unpack_from("<Q", other)
    header = change_json(random, data[8 : 8 + length], other[8 : 8 + donor])
    number = len(header) if random.random() < 0.9 else random.choice(BORDERS)
    return struct.pack("<Q", number) + header + data[8 + length :]


def change_template(random: Random, data: bytes, other: bytes) -> bytes:
    """Reverse, repeat, drop or replace words of the template in a tokenizer_config.json."""
    if random.random() < 0.3:
        return change_json(random, data, other)
    config = json.loads(data)
    text = _change_words(random, config["chat_template"].encode(), TEMPLATE_WORDS)
    return json.dumps(config | {"chat_template": text.decode(errors="replace")}).encode()


def change_answer(random: Random, data: bytes, other: bytes) -> bytes:
    """Change words or bytes of an answer that contains tool calls."""
    if random.random() < 0.2:
        return change_bytes(random, data, other)
    return _change_words(random, data, [*ANSWER_WORDS, random.choice(WORD.findall(other))])


def _change_words(random: Random, text: bytes, others: Sequence[bytes]) -> bytes:
    """Reverse, repeat, drop or replace words of a text."""
    words = WORD.findall(text)
    at = random.randrange(len(words) + 1)
    end = at + random.choice([0, 1, 4, 16])
    piece, new = words[at:end], [random.choice(others)]
    ways = [piece * 2, piece * 64, piece[::-1], [b"(" * 50, *piece, b")" * 50], new, new, new, new]
    words[at:end] = random.choice(ways)
    return b"".join(words)

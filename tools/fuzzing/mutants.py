"""Changes of each kind of file, drawn by hypothesis: valid bytes in, bytes that are nearly valid out.

Checksums are made to fit again, most of the time: else no mutant would come past them. An input of
several files is one run of bytes, see `join`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import google_crc32c
from hypothesis import strategies as st

T = TypeVar("T")
MAX_NBYTES = 1 << 16
CRC_NBYTES = 4
BORDERS = [0, 1, 2, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536]
BORDERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
PART = re.compile(rb"== ([a-z_./0-9]{1,80}) (\d{1,9})\n")
EDIT = re.compile(rb'"sha256": *"([0-9a-f]*)", *"edit": *(.*)\}\n?$', re.DOTALL)
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|[\[\]{}]')
COLON = re.compile(rb"\s*:\s*")
WORD = re.compile(rb"\w+|\s+|\{[%{#]-?|-?[%}#]\}|.", re.DOTALL)
RAW_VALUES = [
    "-0", "0.0", "0.5", "1e3", "1e-9", "1e308", "1e400", "-1e400", "5e-324", "NaN", "Infinity",
    "-Infinity", "1e", "01", "0x10", "1_000", "+1", "1.", "true", "false", "null", "nul", "[]", "{}",
    "[[]]", '""', "[1]", '{"a":1}', '"\\ud800"',
]  # fmt: skip
RAW_VALUES += ["9" * 400, "1" + "0" * 5000, "", *map(str, BORDERS), str(2**64), str(-(2**63))]
TEXTS = ["../x", "/etc/passwd", "C:\\x", "a//b", "./a", "con", "\0", "\x1b[31m", "\u202e", "\ufeff"]
TEXTS += ["e\u0301", "f" * 64, "x" * 5000, "int4", "fp16", "stem", "{{ x }}"]
TEMPLATE_WORDS = [
    b"{% for a in messages %}", b"{% endfor %}", b"{% if a %}", b"{% endif %}", b"{{ a.content }}",
    b"range(10**9)", b"'a' * 999999999", b"__class__", b"|attr('x')", b"|map('upper')|list|join",
    b"{% set x = 1 %}", b"{% macro m() %}", b"{% endmacro %}", b"{% include 'x' %}",
    b"{% import 'x' as y %}", b"{% extends 'x' %}", b"cycler.__init__.__globals__", b"**", b"//", b"~",
    b"loop", b"namespace(a=1)", b"raise_exception('x')", b"1" * 5000, b"lipsum(9)", b"\xff", b"(" * 50,
    b"{{ ''.join(['a'] * 9) }}", b"{% raw %}", b"{% call m() %}", b"{# ", b" #}", b"none", b".format",
]  # fmt: skip


def _packed(number: int, nbytes: int, order: Literal["little", "big"]) -> bytes:
    """An unsigned number; one that is too large is cut."""
    return (number % (1 << 8 * nbytes)).to_bytes(nbytes, order)


NUMBERS = st.builds(
    _packed,
    st.sampled_from(BORDERS) | st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["little", "big"]),
)
VALUES = st.one_of(
    st.sampled_from(RAW_VALUES),
    st.integers().map(str),
    st.floats().map(repr),
    (st.text(max_size=20) | st.sampled_from(TEXTS)).map(json.dumps),
).map(str.encode)


class Step(NamedTuple):
    """One change as it is drawn, before anybody looks at the file: strategies that are made anew for
    each file would take most of the time."""

    file: int
    at: int
    way: int
    donor: int
    rare: int  # 0 to 39
    length: int  # of a piece of bytes
    value: bytes  # JSON
    piece: bytes


# Of a step, a file, and another of its kind to take pieces from. Raises ValueError where it cannot.
Change: TypeAlias = Callable[[Step, bytes, bytes], bytes]
PLACE = st.integers(0, 65535)  # hypothesis draws from longer ranges unevenly
STEPS = st.builds(
    Step, PLACE, PLACE, PLACE, PLACE, st.integers(0, 39), st.sampled_from([0, 1, 4, 8, 16, 64, 1024]),
    VALUES, NUMBERS | st.binary(max_size=16),
)  # fmt: skip


def mutants(change: Change, seeds: Sequence[bytes]) -> st.SearchStrategy[Iterator[bytes]]:
    """Many inputs from each draw, because draws take longer than most readers: every seed with each of
    the drawn changes, and with all up to that one."""

    def changed(data: bytes, other: bytes, step: Step) -> bytes:
        try:
            found = change(step, data, other)
        except (ValueError, struct.error, UnicodeError):  # an earlier change broke its form
            found = change_bytes(step, data, other)
        return found[:MAX_NBYTES]

    def inputs(steps: list[Step]) -> Iterator[bytes]:
        for seed in seeds:
            data = seed
            for step in steps:
                other = _pick(seeds, step.file)
                yield changed(seed, other, step)
                data = changed(data, other, step)
                yield data

    return st.lists(STEPS, min_size=1, max_size=8).map(inputs)


def _pick(found: Sequence[T], number: int) -> T:
    if not found:
        raise ValueError("nothing to change")
    return found[number % len(found)]


def change_bytes(step: Step, data: bytes, other: bytes) -> bytes:
    """Other bytes in place of some, or between two."""
    at, start = step.at % (len(data) + 1), step.donor % (len(other) + 1)
    here, there = data[at : at + step.length], other[start : start + step.length]
    piece, gone = _pick(
        [
            (step.piece, len(step.piece)),
            (step.piece, 0),
            (step.piece, step.length),
            (here, 0),
            (there, 0),
            (there, step.length),
            (b"", step.length),
        ],
        step.way,
    )
    return data[:at] + piece + data[at + gone :]


def change_json(step: Step, data: bytes, other: bytes) -> bytes:
    """A name, a value or a pair of both that is odd, another one, doubled, gone or deep inside."""
    start, end = _pick(_spans(data), step.at)
    old, donor = data[start:end], _pick(_spans(other), step.donor)
    near = step.donor % 5 - 2
    ways: list[Callable[[], bytes]] = [
        lambda: step.value,
        lambda: b"%d" % (int(old) + near) if old.isdigit() and len(old) < 20 else step.value,
        lambda: other[slice(*donor)],
        lambda: b",".join([old] * _pick([2, 3, 9, 40], step.donor)),
        lambda: _nested(old, _pick([1, 31, 32, 33, 100, 2000], step.donor)),
    ]
    way = step.way % (len(ways) + 1)
    if way == len(ways):
        return data[:start] + data[end:].lstrip().removeprefix(b",")
    return data[:start] + ways[way]() + data[end:]


def _nested(value: bytes, depth: int) -> bytes:
    return b"[" * depth + value + b"]" * depth


@lru_cache(maxsize=1000)
def _spans(data: bytes) -> list[tuple[int, int]]:
    """Where each name, each value and each pair of the two stands in a JSON text."""
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
    """Several files in one: of each `== NAME SIZE`, a line, and its bytes."""
    return b"".join(f"== {name} {len(data)}\n".encode() + data for name, data in files.items())


def split(data: bytes) -> dict[str, bytes]:
    """The files in one; what does not parse is left out."""
    files, at = {}, 0
    while head := PART.match(data, at):
        at = head.end() + int(head[2])
        files[head[1].decode()] = data[head.end() : at]
    return files


def change_store(step: Step, data: bytes, other: bytes) -> bytes:
    """A table store with a file that is changed or missing."""
    files, donors = split(data), split(other)
    name = _pick(sorted(files), step.file)
    change = change_json if name.endswith(".json") else _change_sealed
    if step.rare == 39:
        del files[name]
    else:
        files[name] = change(step, files[name], donors.get(name, files[name]))
    return join(files)


def _change_sealed(step: Step, data: bytes, other: bytes) -> bytes:
    """Changed bytes before a checksum that is right again: an index, at the end of a file."""
    sums = (n for n in range(4, len(data) - 3, 4) if _crc(data[-4 - n : -4]) == data[-4:])
    nbytes = next(sums, 0)
    if not nbytes or step.rare % 2:
        return change_bytes(step, data, other)
    start = len(data) - CRC_NBYTES - nbytes
    changed = change_bytes(step, data[start:-CRC_NBYTES], other)
    return data[:start] + changed + _crc(changed)


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CRC_NBYTES, "little")


def change_edit(step: Step, data: bytes, other: bytes) -> bytes:
    """An edit file whose edit was changed; its checksum is right, most of the time."""
    found, donor = EDIT.search(data), EDIT.search(other)
    if found is None or donor is None or step.rare % 6 == 5:
        return change_json(step, data, other)
    content = change_json(step, found[2], donor[2])
    digest = hashlib.sha256(content).hexdigest().encode()
    return data[: found.start(1)] + digest + b'", "edit": ' + content + b"}\n"


def change_safetensors(step: Step, data: bytes, other: bytes) -> bytes:
    """A file whose header was changed; its length is right, most of the time."""
    ((length,), (donor,)) = struct.unpack_from("<Q", data), struct.unpack_from("<Q", other)
    header = change_json(step, data[8 : 8 + length], other[8 : 8 + donor])
    number = len(header) if step.rare < 35 else _pick(BORDERS, step.rare)
    return struct.pack("<Q", number) + header + data[8 + length :]


def change_archive(step: Step, data: bytes, other: bytes) -> bytes:
    """An archive of torch.save with a changed member, or changed around its members."""
    if step.rare % 4 == 3:
        return change_bytes(step, data, other)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, EOFError) as error:
        raise ValueError("no archive") from error
    # Half of the time the pickle: it says what all others mean.
    names = sorted(members) + [name for name in members if name.endswith(".pkl")] * len(members)
    name = _pick(names, step.file)
    members[name] = change_bytes(step, members[name], b"".join(members.values()))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return file.getvalue()


def change_template(step: Step, data: bytes, other: bytes) -> bytes:
    """tokenizer_config.json whose template has words that were moved, doubled, dropped or exchanged."""
    if step.rare % 3 == 2:
        return change_json(step, data, other)
    try:
        config = json.loads(data)
        words = WORD.findall(config["chat_template"].encode())
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no template") from error
    at = step.at % (len(words) + 1)
    end = at + min(step.length, 16)
    piece = words[at:end]
    ways = [piece * 2, piece * 64, piece[::-1], [b"(" * 50, *piece, b")" * 50]]
    ways += [[_pick(TEMPLATE_WORDS, step.donor)]] * len(ways)
    words[at:end] = _pick(ways, step.way)
    text = b"".join(words).decode(errors="replace")
    return json.dumps(config | {"chat_template": text}).encode()

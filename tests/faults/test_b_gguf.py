"""Catalogue B1 to B8: backbone.gguf, checked before ggml sees it.

tests/test_gguf_file.py and tests/test_gguf_check.py go through everything in the format; here is
each line of the catalogue, and what reading costs at the worst.
"""

from __future__ import annotations

import shutil
import struct
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import needs_ggml
from contract import refused
from gguf_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    Tensor,
    array,
    array_start,
    gguf,
    number,
    string,
    strings,
    text,
)

import stem_edge
from stem_edge import disk
from stem_edge.bundle import GGUF
from stem_edge.errors import BackendError, BundleError
from stem_edge.ggml_types import F32, Q4_0
from stem_edge.gguf_check import check_backbone
from stem_edge.gguf_file import (
    MAX_STRINGS,
    MAX_TENSORS,
    GgufFile,
    GgufTensor,
    parse_gguf,
    read_gguf,
)
from stem_edge.runtime import ggml_weights

HUGE = [1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]
PLACE = Path("there/backbone.gguf")


def gguf_refused(data: bytes, *naming: str) -> str:
    return refused(lambda: parse_gguf(data, PLACE), BundleError, PLACE, *naming, seconds=30)


def test_bytes_and_files_are_read_alike(tiny_gguf: Path) -> None:
    path = tiny_gguf / GGUF
    assert parse_gguf(path.read_bytes(), path) == read_gguf(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ends at byte 4"),
        (b"GGU", "ends at byte 4"),
        (b"GGML" + bytes(40), "b'GGML'"),
        (b"lmgg" + bytes(40), "b'lmgg'"),
        (b"\x08\x0a\x12\x09" + bytes(40), "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0, expected 3"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1, expected 3"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "version 2, expected 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4, expected 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_b1_other_formats_are_named(data: bytes, said: str) -> None:
    gguf_refused(data, said)


def test_b1_a_cut_file_is_refused_by_the_command(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from contract import command_refused

    copy = shutil.copytree(tiny_gguf, tmp_path / "copy")
    with (copy / GGUF).open("r+b") as file:
        file.truncate(1000)
    command_refused(capsys, ["generate", copy, "-p", "x"], copy / GGUF, "1000 bytes", kept=[copy])


@pytest.mark.parametrize("count", HUGE)
def test_b2_counts_beyond_the_file(count: int) -> None:
    """A file of 49 bytes made another reader count to 2^63."""
    number_of = struct.pack("<Q", count)
    head, rest = b"GGUF" + struct.pack("<I", 3), bytes(25)
    gguf_refused(head + number_of + bytes(8) + rest, f"{count} tensors")
    gguf_refused(head + bytes(8) + number_of + rest, f"{count} keys")
    gguf_refused(head + struct.pack("<QQ", 0, 1) + number_of + rest, "key")
    value = string("k") + struct.pack("<I", STRING) + number_of
    gguf_refused(head + struct.pack("<QQ", 0, 1) + value + rest, "'k'")
    for kind in (UINT8, BOOL, FLOAT32, UINT64, STRING):
        array_of = string("general.k") + array_start(kind, 0)[:-8] + number_of
        gguf_refused(head + struct.pack("<QQ", 0, 1) + array_of + rest, str(count))


@pytest.mark.parametrize("depth", [1, 10_000])
def test_b2_arrays_in_arrays(depth: int) -> None:
    value = array_start(ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * depth
    gguf_refused(gguf([("k", value)]), "array of arrays")


@pytest.mark.parametrize(
    "value",
    [number(UINT32, a) for a in (0, 1, 13, 33, 1 << 31)]
    + [number(INT32, -32), number(FLOAT32, 32.0), number(BOOL, 1), text("32"), array(UINT32, [32])],
)
def test_b3_alignments(value: bytes) -> None:
    gguf_refused(
        gguf([("general.alignment", value)]), "general.alignment", "expected a power of two"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (1 << 32, 1 << 32),
        ((1 << 62) + 32, 4),
        ((1 << 64) - 32, 1),
        (1 << 63, 2),
        (32, (1 << 64) - 1),
        (32, (1 << 64) // 18 + 1),
    ],
)
def test_b4_products_that_wrap(sizes: tuple[int, int]) -> None:
    """In 64 bits each of these products, or its bytes, or these padded, is a small number."""
    gguf_refused(gguf([], [Tensor("w", sizes, Q4_0.number, 0)], bytes(64)), "tensor 'w'")


@pytest.mark.parametrize("sizes", [(), (0,), (32, 0), (32, 1, 1), (31,)])
def test_b4_sizes_that_cannot_be(sizes: tuple[int, ...]) -> None:
    gguf_refused(gguf([], [Tensor("w", sizes, Q4_0.number, 0)], bytes(64)), "tensor 'w'")


@pytest.mark.parametrize("offset", [32, 64, 1 << 62, (1 << 64) - 32, 1])
def test_b5_tensors_beyond_the_file(offset: int) -> None:
    gguf_refused(gguf([], [Tensor("w", (8,), F32.number, offset)], bytes(32)), f"offset {offset}")
    gguf_refused(gguf([], [Tensor("w", (16,), F32.number, 0)], bytes(32)), "64 bytes ends at byte")


def test_b6_names() -> None:
    twice = [Tensor("w", (8,), F32.number, at) for at in (0, 32)]
    gguf_refused(gguf([], twice, bytes(64)), "'w' is there more than once")
    gguf_refused(gguf([("k", text("a")), ("k", text("b"))]), "'k' is there more than once")
    gguf_refused(gguf([("", text("a"))]), "0 bytes, expected 1 to 256")
    gguf_refused(gguf([("k" * 257, text("a"))]), "257 bytes, expected 1 to 256")
    for name, said in (("", "0 bytes"), ("w" * 64, "64 bytes"), ("a\0b", "not printable")):
        gguf_refused(gguf([], [Tensor(name, (8,), F32.number, 0)], bytes(32)), said)
    gguf_refused(gguf([(b"\xff", text("a"))]), "not UTF-8")


def test_b7_keys_of_other_types(tiny_gguf: Path, tmp_path: Path) -> None:
    """The file's tokenizer is for other programs: what is in its tokens is nothing to us."""
    data = bytearray((tiny_gguf / GGUF).read_bytes())
    manifest = stem_edge.open_bundle(tiny_gguf).manifest
    key = data.index(string("stem.block_count")) + len(string("stem.block_count"))
    for kind, value in ((INT32, -1), (FLOAT32, 3.0), (UINT32, 4)):
        data[key : key + 8] = number(kind, value)
        file = parse_gguf(bytes(data), PLACE)
        refused(partial(check_backbone, file, manifest), BundleError, "stem.block_count")
    data[key : key + 4] = struct.pack("<I", 99)
    gguf_refused(bytes(data), "type 99, which is unknown")
    odd = strings(["<0x-1>", "", "\0", "<0xZZ>"])
    assert parse_gguf(gguf([("tokenizer.ggml.tokens", odd)]), PLACE).metadata == {}


@needs_ggml
def test_b8_a_file_that_is_cut_is_not_mapped(tiny_gguf: Path, tmp_path: Path) -> None:
    """Reading beyond the end of a mapped file would end the process."""
    copy = Path(shutil.copytree(tiny_gguf, tmp_path / "copy"))
    with (copy / GGUF).open("r+b") as file:
        file.truncate((copy / GGUF).stat().st_size - 32)
    refused(lambda: read_gguf(copy / GGUF), BundleError, copy / GGUF, "ends at byte")
    refused(lambda: stem_edge.load(copy), BundleError, copy / GGUF, "expected")
    header = read_gguf(tiny_gguf / GGUF)
    later = GgufFile(copy / GGUF, header.nbytes, header.metadata, header.tensors)
    embedding: GgufTensor = header.tensors["token_embd.weight"]
    refused(
        lambda: ggml_weights._mapped(later, embedding),
        BackendError,
        copy / GGUF,
        str(header.nbytes),
    )
    (copy / GGUF).unlink()
    refused(lambda: ggml_weights._mapped(later, embedding), BackendError, copy / GGUF, "mapped")


def test_b8_the_file_is_read_through_the_seam(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, buffer: memoryview, offset: int) -> int:
        raise OSError(5, "Input/output error")

    def short(descriptor: int, buffer: memoryview, offset: int) -> int:
        return pread(descriptor, buffer[:7], offset)

    pread, found = disk.pread, read_gguf(tiny_gguf / GGUF)
    monkeypatch.setattr(disk, "pread", short)
    assert read_gguf(tiny_gguf / GGUF) == found
    monkeypatch.setattr(disk, "pread", broken)
    refused(lambda: read_gguf(tiny_gguf / GGUF), BundleError, tiny_gguf / GGUF, "Input/output")


COSTLY = {
    "strings": lambda: gguf([("k", array_start(STRING, MAX_STRINGS) + bytes(8 * MAX_STRINGS))]),
    "too many strings": lambda: gguf([(k, strings([""] * 1_100_000)) for k in "ab"]),
    "tensors": lambda: gguf(
        [],
        [Tensor(f"{n:063}", (1,), F32.number, 32 * n) for n in range(MAX_TENSORS)],
        bytes(32 * MAX_TENSORS),
    ),
    "arrays that could be kept": lambda: gguf(
        [(f"general.{n}", array(INT32, range(1000, 66536))) for n in range(120)]
    ),
    "long strings": lambda: gguf([(f"general.{n}", text("a" * 1_000_000)) for n in range(60)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COSTLY)
def test_b2_the_costliest_headers(case: str, tmp_path: Path) -> None:
    """Memory and time of up to 60 MB of whatever takes the most of them, each byte of it true."""
    resource, data = pytest.importorskip("resource"), COSTLY[case]()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if case == "too many strings":
        gguf_refused(data, "strings in key 'b'")
    else:
        parse_gguf(data, PLACE)
    assert time.process_time() - started < 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 256

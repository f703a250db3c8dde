"""backbone.gguf: exact bytes, and nothing that could stop ggml is believed."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    CODES,
    FLOAT32,
    FLOAT64,
    INT8,
    INT64,
    UINT8,
    UINT32,
    UINT64,
    Tensor,
    array,
    array_start,
    gguf,
    number,
    padded,
    strings,
    text,
)

from stem_edge import gguf_file
from stem_edge.bundle import GGUF
from stem_edge.errors import BundleError
from stem_edge.ggml_types import F32, Q4_0, Q8_0, WEIGHT_TYPES
from stem_edge.gguf_file import (
    MAX_HEADER_NBYTES,
    MAX_KEPT_STRING_NBYTES,
    MAX_KEPT_VALUES,
    GgufFile,
    read_gguf,
)

# "a" is float32 [2, 3], "b" Q8_0 [32]; each is padded to 32 bytes.
GOLDEN = bytes.fromhex(
    "47475546 03000000 0200000000000000 0200000000000000"
    "0c00000000000000 67656e6572616c2e6e616d65 08000000 0300000000000000 74776f"  # general.name two
    "0700000000000000 7374656d2e7878 09000000 05000000 0200000000000000 ffffffff 02000000"
    "0100000000000000 61 02000000 0300000000000000 0200000000000000 00000000 0000000000000000"
    "0100000000000000 62 01000000 2000000000000000 08000000 2000000000000000"
    + "00" * 20
    + "0000803f" * 6
    + "00" * 8
    + "07" * 34
    + "00" * 30
)
SMALL = gguf(
    [
        ("general.alignment", number(UINT32, 32)),
        ("a.flag", number(BOOL, 1)),
        ("stem.list", array(UINT32, [1, 2])),
        ("t.words", strings(["ab", "", "ü"])),
        ("t.scores", array(FLOAT32, [0.5])),
    ],
    [Tensor("m", [32, 2], Q4_0.number, 0), Tensor("v", [3], F32.number, 64)],
    padded(b"\1" * 36) + padded(b"\2" * 12),
)


def read(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return read_gguf(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / GGUF


def refusal(path: Path, data: bytes) -> str:
    with pytest.raises(BundleError) as caught:
        read(path, data)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith("stem-edge export CHECKPOINT OUT --engine gguf")
    assert message.isprintable()
    assert len(message) < 1000
    return message


def with_tensors(*tensors: Tensor, data: bytes = b"") -> bytes:
    return gguf([], tensors, data)


# What is read


def test_exact_bytes(file: Path) -> None:
    found = read(file, GOLDEN)
    assert found.path == file
    assert found.nbytes == len(GOLDEN) == 288
    assert found.metadata == {"general.name": "two", "stem.xx": (-1, 2)}
    assert found.tensors == {
        "a": ("a", F32, (2, 3), 192, 24),
        "b": ("b", Q8_0, (32,), 224, 34),
    }
    assert list(found.tensors) == ["a", "b"]


def test_the_helper_writes_the_same_bytes() -> None:
    keys = [("general.name", text("two")), ("stem.xx", array(5, [-1, 2]))]
    tensors = [Tensor("a", [3, 2], 0, 0), Tensor("b", [32], 8, 32)]
    data = padded(struct.pack("<6f", *[1] * 6)) + padded(b"\7" * 34)
    assert gguf(keys, tensors, data) == GOLDEN


VALUES = [
    *[(kind, 7) for kind in CODES if kind not in (FLOAT32, FLOAT64, BOOL)],
    *[(INT8, -128), (UINT8, 255), (UINT64, 2**64 - 1), (INT64, -(2**63))],
    *[(FLOAT32, 0.1), (FLOAT64, 0.1), (BOOL, 0), (BOOL, 1), (FLOAT32, float("inf"))],
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_values_of_every_type(file: Path, kind: int, value: float) -> None:
    found = read(file, gguf([("k", number(kind, value))])).metadata["k"]
    stored = struct.unpack("<f", struct.pack("<f", value))[0] if kind == FLOAT32 else value
    assert found == stored
    types = {FLOAT32: float, FLOAT64: float, BOOL: bool}
    assert type(found) is types.get(kind, int)


@pytest.mark.parametrize("said", ["", "stem", "Grüße, 世界\n\0"])
def test_strings(file: Path, said: str) -> None:
    assert read(file, gguf([("k", text(said))])).metadata == {"k": said}


@pytest.mark.parametrize("kind", CODES)
def test_arrays_of_every_type(file: Path, kind: int) -> None:
    """Those that may be needed are kept, and what follows is found behind all of them."""
    keys = [("stem.a", array(kind, [1, 0])), ("stem.b", array(kind, [])), ("x.a", array(kind, [1]))]
    found = read(file, gguf([*keys, ("last", number(UINT8, 9))])).metadata
    floats = kind in (FLOAT32, FLOAT64)
    assert found == {"last": 9} if floats else {"stem.a": (1, 0), "stem.b": (), "last": 9}


def test_what_is_not_kept(file: Path) -> None:
    keys = [
        ("long", text("x" * (MAX_KEPT_STRING_NBYTES + 1))),
        ("stem.long", array(BOOL, [1] * (MAX_KEPT_VALUES + 1))),
        ("general.tags", strings(["a", ""])),
        ("tokenizer.ggml.token_type", array(UINT32, [1, 2])),
        ("last", number(UINT8, 9)),
    ]
    assert read(file, gguf(keys)).metadata == {"last": 9}


@pytest.mark.parametrize("number_of", WEIGHT_TYPES)
def test_tensors_of_every_type(file: Path, number_of: int) -> None:
    type = WEIGHT_TYPES[number_of]
    nbytes = 3 * 2 * type.nbytes
    data = with_tensors(Tensor("m", [2 * type.block, 3], number_of, 0), data=bytes(nbytes))
    found = read(file, data).tensors["m"]
    assert found == ("m", type, (3, 2 * type.block), len(data) - nbytes, nbytes)


def test_tensors_may_be_listed_in_another_order(file: Path) -> None:
    tensors = [Tensor("v", [3], 0, 32), Tensor("w", [8], 0, 0)]
    assert list(read(file, with_tensors(*tensors, data=bytes(44))).tensors) == ["v", "w"]


@pytest.mark.parametrize("alignment", [32, 64, 4096, 65536])
def test_alignments(file: Path, alignment: int) -> None:
    keys = [("general.alignment", number(UINT32, alignment))]
    tensors = [Tensor("v", [1], 0, 0), Tensor("w", [1], 0, alignment)]
    data = padded(b"1234", alignment) + b"5678"
    found = read(file, gguf(keys, tensors, data, alignment)).tensors["w"]
    assert found.offset % alignment == 0
    assert file.read_bytes()[found.offset :] == b"5678"


def test_the_longest_names(file: Path) -> None:
    data = gguf([("k" * 256, number(UINT8, 1))], [Tensor("t" * 63, [8], 0, 0)], bytes(32))
    assert list(read(file, data).tensors) == ["t" * 63]


def test_a_vocabulary_is_passed_over(file: Path) -> None:
    words = strings([f"word {n}" for n in range(30_000)])
    found = read(file, gguf([("tokenizer.ggml.tokens", words), ("last", number(UINT8, 9))]))
    assert found.metadata == {"last": 9}


def test_only_the_header_is_read(file: Path) -> None:
    width = 1 << 30
    file.write_bytes(with_tensors(Tensor("v", [width], 0, 0)))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size + 4 * width)
    tracemalloc.start()
    try:
        assert read_gguf(file).tensors["v"].nbytes == 4 * width
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# What is not


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"GGML\3\0\0\0", "begins with b'GGML', expected b'GGUF'"),
        (b"GGUF\2\0\0\0", "has version 2, expected 3"),
        (b"GGUF\4\0\0\0", "has version 4, expected 3"),
        (b"GGUF\0\0\0\0", "has version 0, expected 3"),
        (b"GGUF\0\0\0\3", "is big-endian, expected little-endian"),
    ],
)
def test_another_format(file: Path, start: bytes, said: str) -> None:
    assert said in refusal(file, start + GOLDEN[8:])


def test_files_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot read \(No such file or directory\); restore"):
        read_gguf(file)
    file.mkdir()
    with pytest.raises(BundleError, match="not a regular file"):
        read_gguf(file)


HUGE = [2**63, 2**64 - 1, 2**63 - 1, 2**32, 300]
ONE = gguf([("stem.a", array(UINT32, [1, 2])), ("k", text("v")), ("x.s", strings(["a"]))])


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize(
    ("data", "at", "said"),
    [
        (GOLDEN, 8, "{} tensors, but there is room for 8"),
        (GOLDEN, 16, "{} keys, but there is room for 18"),
        (GOLDEN, 24, "key at byte 32 has {} bytes, expected 1 to 256"),
        (GOLDEN, 48, "key 'general.name' ends at byte "),
        (GOLDEN, 82, "{} values in key 'stem.xx', but there is room for 49"),
        (GOLDEN, 98, "name of a tensor at byte 106 has {} bytes, expected 1 to 63"),
        (GOLDEN, 111, "tensor 'a' of {bytes} bytes ends at byte"),
        (GOLDEN, 119, "tensor 'a' of {rows} bytes ends at byte"),
        (GOLDEN, 164, "'b' is at offset {} of the data, expected"),
        (ONE, 103, "{} strings in key 'x.s', but there is room for"),
        (ONE, 111, "key 'x.s' ends at byte "),
    ],
)
def test_numbers_beyond_the_file(file: Path, data: bytes, at: int, said: str, count: int) -> None:
    damaged = data[:at] + struct.pack("<Q", count) + data[at + 8 :]
    tracemalloc.start()
    try:
        message = refusal(file, damaged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert said.format(count, bytes=8 * count, rows=12 * count) in message


KEYS: dict[str, tuple[list[tuple[str | bytes, bytes]], str]] = {
    "repeated": (
        [("k", number(UINT8, 1)), ("k", text("x"))],
        "key 'k' is there more than once",
    ),
    "repeated, not kept": (
        [("k", strings([])), ("k", strings([]))],
        "key 'k' is there more than once",
    ),
    "no name": ([("", number(UINT8, 1))], "key at byte 32 has 0 bytes, expected 1 to 256"),
    "long name": ([("k" * 257, number(UINT8, 1))], "has 257 bytes, expected 1 to 256"),
    "line break": ([("a\nb", number(UINT8, 1))], r"key 'a\nb' is not printable"),
    "reversed": ([("a\u202eb", number(UINT8, 1))], r"key 'a\u202eb' is not printable"),
    "no UTF-8": ([(b"\xff", number(UINT8, 1))], "key at byte 32 is not UTF-8"),
    "surrogate": ([(b"\xed\xa0\x80", number(UINT8, 1))], "key at byte 32 is not UTF-8"),
    "value": ([("k", text(b"\xc3"))], "key 'k' at byte 45 is not UTF-8"),
    "array": ([("k", strings(["a", b"\xc3("]))], "key 'k' has a string at byte 66 that is not"),
    "type": ([("k", struct.pack("<I", 13))], "key 'k' has a value of type 13, which is unknown"),
    "type of values": ([("k", array_start(99, 0))], "key 'k' has a value of type 99"),
    "nested": ([("k", array_start(ARRAY, 0))], "key 'k' is an array of arrays"),
    "bool": ([("k", number(BOOL, 2))], "key 'k' has a bool at byte 37 that is neither 0 nor 1"),
    "bools": ([("k", array(BOOL, [1, 255]))], "key 'k' has a bool at byte 49"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_and_values(file: Path, case: str) -> None:
    keys, said = KEYS[case]
    assert said in refusal(file, gguf(keys))


@pytest.mark.parametrize("value", [0, 1, 8, 16, 31, 33, 48, 96, 1 << 17, 1 << 31])
def test_alignments_that_cannot_be(file: Path, value: int) -> None:
    message = refusal(file, gguf([("general.alignment", number(UINT32, value))]))
    assert f"general.alignment is {value}; expected a power of two, 32 to 65536" in message


@pytest.mark.parametrize("value", [text("32"), number(FLOAT32, 32), number(BOOL, 1), strings([])])
def test_alignments_of_other_types(file: Path, value: bytes) -> None:
    assert "general.alignment is " in refusal(file, gguf([("general.alignment", value)]))


TENSORS = {
    "repeated": ([Tensor("t", [8], 0, 0), Tensor("t", [8], 0, 32)], "'t' is there more than once"),
    "no name": ([Tensor("", [8], 0, 0)], "has 0 bytes, expected 1 to 63"),
    "long name": ([Tensor("t" * 64, [8], 0, 0)], "has 64 bytes, expected 1 to 63"),
    "odd name": ([Tensor("\x1b[2J", [8], 0, 0)], r"name of a tensor '\x1b[2J' is not printable"),
    "scalar": ([Tensor("t", [], 0, 0)], "tensor 't' has 0 dimensions, expected 1 or 2"),
    "cube": ([Tensor("t", [2, 2, 2], 0, 0)], "tensor 't' has 3 dimensions, expected 1 or 2"),
    "no columns": ([Tensor("t", [0, 8], 0, 0)], "'t' is F32 [8, 0]; expected rows of"),
    "no rows": ([Tensor("t", [8, 0], 0, 0)], "'t' is F32 [0, 8]; expected rows of"),
    "type": (
        [Tensor("t", [8], 41, 0)],
        "'t': tensor type 41 is unknown; expected one of 0 (F32), 1",
    ),
    "removed type": ([Tensor("t", [8], 4, 0)], "tensor type 4 is unknown"),
    "great type": ([Tensor("t", [8], 2**32 - 1, 0)], "tensor type 4294967295 is unknown"),
    "block": ([Tensor("t", [48], 8, 0)], "is Q8_0 [48]; expected rows of a multiple of 32 values"),
    "long block": ([Tensor("t", [128], 12, 0)], "is Q4_K [128]; expected rows of a multiple of 256"),
    "unaligned": (
        [Tensor("t", [4], 0, 0), Tensor("u", [4], 0, 16)],
        "tensor 'u' is at offset 16 of the data, expected 32",
    ),
    "overlap": ([Tensor("t", [16], 0, 0), Tensor("u", [8], 0, 32)], "at offset 32"),
    "same place": ([Tensor("t", [8], 0, 0), Tensor("u", [8], 0, 0)], "'u' is at offset 0 of the"),
    "gap": ([Tensor("t", [8], 0, 0), Tensor("u", [8], 0, 64)], "at offset 64 of the data, expected 32"),
    "gap before": ([Tensor("t", [8], 0, 32)], "'t' is at offset 32 of the data, expected 0"),
    "outside": ([Tensor("t", [33], 0, 0)], "'t' of 132 bytes ends at byte 196, but the file at 192"),
    "overflow": ([Tensor("t", [2**32, 2**32], 0, 0)], f"of {2**66} bytes ends at byte"),
    "overflow to 0": ([Tensor("t", [2**63, 2], 8, 0)], "ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(file: Path, case: str) -> None:
    tensors, said = TENSORS[case]
    header = with_tensors(*tensors)
    assert said in refusal(file, header + bytes(192 - len(header)))


def test_only_padding_is_behind_the_last_tensor(file: Path) -> None:
    data = with_tensors(Tensor("v", [3], 0, 0), data=bytes(12))
    for padding in range(21):
        assert read(file, data + bytes(padding)).nbytes == len(data) + padding
    for more in (21, 32, 1 << 20):
        end = len(data)
        assert f"{more} bytes are left after its data, which end at {end}" in refusal(
            file, data + bytes(more)
        )
    assert "32 bytes are left" in refusal(file, gguf() + bytes(32))


def test_truncation_at_every_byte(file: Path) -> None:
    for data, padding in ((GOLDEN, 30), (SMALL, 20)):
        for end in range(len(data) - padding):
            message = refusal(file, data[:end])
            assert "ends at byte" in message or "there is room for" in message
        assert read(file, data[: len(data) - padding]).nbytes == len(data) - padding


def test_a_file_that_is_cut_while_it_is_read(file: Path) -> None:
    data = gguf([("k", text("x" * 200_000))])
    file.write_bytes(data[:100_000])
    with file.open("rb") as opened, pytest.raises(ValueError, match="ends at byte 100000 while"):
        gguf_file._parse(file, gguf_file._Header(opened, len(data)))


def test_the_longest_header(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gguf([("k", text("x" * 200)), ("l", text("x" * 200))])
    monkeypatch.setattr(gguf_file, "MAX_HEADER_NBYTES", 300)
    assert "key 'l' ends at byte 466, but the longest header at 300" in refusal(file, data)
    assert MAX_HEADER_NBYTES == 64 << 20


def test_too_many(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_KEYS", 4)
    assert "5 keys, but there is room for 4" in refusal(file, SMALL)
    monkeypatch.setattr(gguf_file, "MAX_TENSORS", 1)
    assert "2 tensors, but there is room for 1" in refusal(file, SMALL)


# Anything else


def attempt(path: Path, data: bytes) -> bool:
    """Whether it is a file; it is refused in no other way than by a BundleError."""
    path.write_bytes(data)
    try:
        found = read_gguf(path)
    except BundleError as error:
        assert str(error).isprintable()
        return False
    for tensor in found.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
        assert tensor.offset % 32 == 0
    return True


@pytest.mark.slow
@pytest.mark.parametrize("data", [GOLDEN, SMALL], ids=["golden", "small"])
@pytest.mark.parametrize("flip", [0x01, 0x04, 0x80, 0xFF])
def test_every_flipped_byte(file: Path, data: bytes, flip: int) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        accepted = 0
        for at in range(len(data)):
            accepted += attempt(file, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    # 50 ms each is far from what it takes, and one that is slow would show in the sum.
    assert time.process_time() - started < 0.05 * len(data)
    assert 0 < accepted < len(data)


def mutated(data: bytes, luck: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(luck.randint(1, 4)):
        at = luck.randrange(len(found))
        match luck.randrange(5):
            case 0:
                found[at] = luck.randrange(256)
            case 1:
                found[at : at + 8] = struct.pack("<Q", luck.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
            case 2:
                del found[at : at + luck.randint(1, 16)]
            case 3:
                found[at:at] = luck.randbytes(luck.randint(1, 16))
            case 4:
                start = luck.randrange(len(found))
                found[at:at] = found[start : start + luck.randint(1, 64)]
        if not found:
            return bytes(1)
    return bytes(found)


@pytest.mark.slow
def test_random_damage(file: Path) -> None:
    luck = random.Random(1)
    accepted = sum(attempt(file, mutated(luck.choice([GOLDEN, SMALL]), luck)) for _ in range(4000))
    assert 0 < accepted < 2000


def test_random_bytes(file: Path) -> None:
    luck = random.Random(2)
    for _ in range(500):
        assert not attempt(file, GOLDEN[: luck.choice([8, 16, 24])] + luck.randbytes(200))

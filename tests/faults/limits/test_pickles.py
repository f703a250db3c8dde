"""Limits of torch's pickles, read as data: each instruction, and the parts of tensors."""

from __future__ import annotations

import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import refused
from torch_archives import archive

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files import torch as torch_files
from stem_edge.export.tensor_files import torch_pickle
from stem_edge.export.tensor_files.stored_tensor import (
    VALUE_NBYTES,
    SourceFile,
    StoredTensor,
    joined,
)
from stem_edge.export.tensor_files.torch import (
    describe,
    guarded,
    load_tensors,
    read_archive,
)
from stem_edge.export.tensor_files.torch_pickle import CONSTANT, Made, Name, read_pickle


def value(data: bytes, most: int | None = None) -> Any:
    """Read a pickle. Some names of the module m are allowed; m.pair makes a list."""
    return read_pickle(
        data,
        {"m.x", "m.x y", "m.pair"},
        {"m.pair": lambda a, b: [a, b]},
        lambda described: ("stored", described),
    )


VALUES: list[tuple[bytes, Any]] = [
    (b"N.", None), (b"\x88.", True), (b"\x89.", False), (b"\x80\x02N.", None),
    (b"\x80\x04\x95" + struct.pack("<Q", 2) + b"N.", None), (b"J\xff\xff\xff\xff.", -1),
    (b"K\xff.", 255), (b"M\xff\xff.", 65535), (b"\x8a\x01\x80.", -128),
    (b"G?\xf8" + bytes(6) + b".", 1.5), (b"X\2\0\0\0\xc3\xa9.", "é"), (b"\x8c\1x.", "x"),
    (b"\x8d\1\0\0\0\0\0\0\0x.", "x"), (b"B\1\0\0\0\xff.", b"\xff"), (b"C\1\xff.", b"\xff"),
    (b"\x8e\1\0\0\0\0\0\0\0\xff.", b"\xff"), (b"}.", {}), (b"].", []), (b").", ()),
    (b"K\1\x85.", (1,)), (b"K\1K\2\x86.", (1, 2)), (b"K\1K\2K\3\x87.", (1, 2, 3)),
    (b"(K\1K\2t.", (1, 2)), (b"](K\1K\2e.", [1, 2]), (b"]K\1a.", [1]), (b"}K\1K\2s.", {1: 2}),
    (b"}(K\1K\2\x8c\1xNu.", {1: 2, "x": None}), (b"}(u.", {}), (b"}NNs.", {None: None}),
    (b"}G?\xf8" + bytes(6) + b"Ns.", {1.5: None}), (b"}K\1K\2\x86Ns.", {(1, 2): None}),
    (b"}\x88Ns.", {True: None}), (b"K\7q\5h\5\x86.", (7, 7)), (b"K\7q\0h\0\x86.", (7, 7)),
    (b"K\7r\0\1\0\0j\0\1\0\0\x86.", (7, 7)), (b"(K\7\x94K\x08\x94h\0h\1t.", (7, 8, 7, 8)),
    (b"cm\nx\n.", Name("m.x")), (b"cm\nx y\n.", Name("m.x y")),
    (b"\x8c\1m\x8c\1x\x93.", Name("m.x")), (b"cm\npair\nK\1K\2\x86R.", [1, 2]),
    (b"cm\npair\nK\1K\2\x86\x81.", [1, 2]), (b"K\1K\2\x86Q.", ("stored", (1, 2))), (b"]Nb.", []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_instructions(number: int) -> None:
    data, expected = VALUES[number]
    found = value(data)
    assert (found, type(found)) == (expected, type(expected))


def test_calls_and_what_is_set_afterwards() -> None:
    found = value(b"cm\nx\nK\1\x85R}K\2K\3sb.")
    assert (found.name, found.arguments, found.state) == ("m.x", (1,), {2: 3})
    assert found != Made("m.x", (1,), {2: 3})
    assert value(b"cm\nx\n)R.").state is None
    assert value(b"}cm\nx\n)RNs.").popitem()[1] is None
    with pytest.raises(AttributeError):
        setattr(Name("a"), "text", "b")  # noqa: B010


NOTHING = [
    b"t.", b"a.", b"h\0.", b"q\0.", b"Q.", b"b.", b"}Na.", b")Na.", b"](NNu.", b"}]Ns.", b"}C\1xNs.",
    b"}]\x85Ns.", b"})\x85Ns.", b"NN\x86R.", b"N)R.", b"\x8c\3m.x)R.", b"cm\nx\n]R.",
    b"cm\npair\nK\1\x85R.", b"NK\1\x93.",
]  # fmt: skip
REFUSED: list[tuple[bytes, str]] = [
    *((data, "no valid operands") for data in NOTHING),
    *[(b"", "pickle exhausted"), (b"N", "pickle exhausted"), (b"}(Nu.", "argument")],
    *[(b".", "not enough values"), (b"NN.", "too many values"), (b"I1\n.", "instruction INT")],
    *[(b"\x85.", "instruction 1 has no valid"), (b"N\x86.", "instruction 2 has no valid")],
    *[(b"NN\x87.", "instruction 3 has no valid"), (b"2.", "instruction DUP")],
    *[(b"cos\nx\n.", "it names os.x, which is not needed"), (b"co\ns\n.", "it names o.s, which")],
    *[(b"\x8c\2os\x8c\1x\x93.", "it names os.x"), (b"NN0.", "instruction POP")],
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_instructions_that_make_nothing(number: int) -> None:
    data, said = REFUSED[number]
    with pytest.raises(ValueError, match=said):
        value(data)


def test_values_where_none_are_stored() -> None:
    with pytest.raises(ValueError, match="it refers to values, but has none"):
        read_pickle(b"NQ.", set(), {})


def test_names_are_shown_in_part() -> None:
    with pytest.raises(ValueError, match=f"it names o{'s' * 77}\\.x, which"):
        value(b"co" + b"s" * 77 + b"\nxy\n.")


@pytest.mark.parametrize("more", [0, 1])
def test_the_number_of_instructions(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_pickle.MAX_OPCODES == 2_097_152
    monkeypatch.setattr(torch_pickle, "MAX_OPCODES", 6)
    data = b"]" + b"Na" * 2 + b"(" * more + b"."
    if more:
        with pytest.raises(ValueError, match="more than 6 instructions"):
            value(data)
    else:
        assert value(data) == [None, None]


@pytest.mark.parametrize("depth", [64, 65])
def test_the_depth_of_values(depth: int) -> None:
    for start, wrap in ((b")", b"\x85"), (b"]", b"\x85"), (b"}", b"\x85"), (b"cm\nx\n)R", b"\x85")):
        data = start + wrap * depth + b"."
        if depth > torch_pickle.MAX_DEPTH:
            with pytest.raises(ValueError, match="nested without end"):
                value(data)
        else:
            value(data)


def test_what_is_in_calls_and_keys_is_counted_too() -> None:
    deep = b")" + b"\x85" * 65
    holders = [
        b"cm\nx\n" + deep + b"\x85R.",
        b"cm\nx\n)R" + deep + b"b.",
        b"}N" + deep + b"s.",
        b"}cm\nx\n" + deep + b"\x85RNs.",
        b"]" + deep + b"a.",
        deep + b".",
    ]
    for data in holders:
        with pytest.raises(ValueError, match="nested without end"):
            value(data)


def doubled(times: int, size: int) -> bytes:
    """Make a tuple that holds the same list several times."""
    return b"(](" + b"N" * size + b"eq\0" + b"h\0" * times + b"t."


def test_values_may_be_shared_within_reason() -> None:
    """A pickle may stand for 64 values per instruction, up to the limit of instructions."""
    assert len(value(doubled(60, 60))) == 61
    assert len(value(doubled(2, 2))) == 3
    with pytest.raises(ValueError, match="nested without end"):
        value(doubled(200, 200))


# Tensors


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def storage(kind: str = "FloatStorage", key: str = "0", count: int = 6) -> bytes:
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in ("storage", key, "cpu")]
    name = b"ctorch\n" + kind.encode() + b"\n"
    return b"(" + words[0] + name + words[1] + words[2] + number(count) + b"tQ"


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def plain(
    made: bytes = storage(), offset: int = 0, size: Any = (2, 3), stride: Any = (3, 1)
) -> bytes:
    arguments = made + number(offset) + numbers(*size) + numbers(*stride)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"\x89NtR"


def untyped(dtype: bytes, count: int = 24) -> bytes:
    made = b"(\x8c\x07storagectorch.storage\nUntypedStorage\n\x8c\x010\x8c\x03cpu"
    made += number(count) + b"tQ"
    rest = made + b"K\0" + numbers(3) + numbers(1) + b"\x89N" + dtype
    return b"ctorch._utils\n_rebuild_tensor_v3\n(" + rest + b"tR"


DATA = np.arange(6, dtype="<f4").tobytes()


def loaded(path: Path, made: bytes, data: bytes = DATA, **others: bytes) -> Any:
    parts = {"a/data.pkl": made + b".", "a/data/0": data}
    path.write_bytes(
        archive({**parts, **{f"a/{name}": content for name, content in others.items()}})
    )
    return read_archive(SourceFile(path), 0, path.stat().st_size)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.pth"


def test_tensors(file: Path) -> None:
    found = loaded(file, plain(), byteorder=b"little")
    assert (found.dtype, found.shape, found.nbytes) == ("F32", (2, 3), 24)
    assert found.rows(0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded(file, plain(offset=3, size=(3,), stride=(1,))).rows(0, 3).tolist() == [3, 4, 5]
    assert loaded(file, plain(size=(3, 2), stride=(1, 3))).rows(2, 3).tolist() == [[2, 5]]
    assert loaded(file, plain(size=(0, 3))).shape == (0, 3)
    assert loaded(file, plain(offset=5, size=(), stride=())).shape == ()
    wrapped = b"ctorch._utils\n_rebuild_parameter\n(" + plain() + b"\x88NtR"
    assert loaded(file, wrapped).rows(0, 1).tolist() == [[0, 1, 2]]
    typed = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nN("
    assert loaded(file, typed + plain() + b"\x88tNtR").shape == (2, 3)
    assert loaded(file, b"ccollections\nOrderedDict\n)R") == {}


KINDS = {
    "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Double": "F64", "Int": "I32", "Long": "I64",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "Short": "I16", "ComplexFloat": "C64",
    "ComplexDouble": "C128",
}  # fmt: skip
UNTYPED = {
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip


def test_kinds_of_values(file: Path) -> None:
    for kind, dtype in KINDS.items():
        width = VALUE_NBYTES[dtype]
        made = plain(storage(f"{kind}Storage"))
        assert loaded(file, made, bytes(6 * width)).dtype == dtype
        for nbytes in (6 * width - 1, 6 * width + 1):
            with pytest.raises(ValueError, match=f"{nbytes} bytes for 6 values"):
                loaded(file, made, bytes(nbytes))
    for name, dtype in UNTYPED.items():
        found = loaded(file, untyped(b"ctorch\n" + name.encode() + b"\n"))
        assert (found.dtype, found.shape) == (dtype, (3,))
    assert len(torch_files._TENSOR_NAMES) == 39
    for said, made in (
        ("kind float32", untyped(b"ctorch\nfloat32\n")),
        ("kind a NoneType", untyped(b"N")),
        ("kind torch.float32", plain(storage("float32"))),
        ("a tensor without values", plain(b"(\x8c\7storageN\x8c\x010\x8c\3cpuK\6tQ")),
        ("a tensor without values", plain(b"(\x8c\x05storactorch\nFloatStorage\n\x8c\x010NK\6tQ")),
        ("a tensor without values", plain(b"(\x8c\7storagectorch\nFloatStorage\nK\0NK\6tQ")),
        ("values of the kind", plain(b"(\x8c\7storagectorch\nFloatStorage\n\x8c\x010N\x88tQ")),
        ("no valid operands", plain(b"N")),
        ("the values '1' are missing", plain(storage(key="1"))),
        ("the values '../x' are missing", plain(storage(key="../x"))),
        ("24 bytes for -6 values", plain(storage(count=-6))),
        (f"24 bytes for {2**63} values", plain(storage(count=2**63))),
    ):
        with pytest.raises(ValueError, match=said):
            loaded(file, made)


WRONG: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [
    (-1, (2, 3), (3, 1)), (1, (2, 3), (3, 1)), (0, (2, 3), (4, 1)), (0, (2, 3), (3,)),
    (0, (7, 1), (0, 0)), (0, (2, 3), (-3, 1)), (6, (1,), (1,)), (0, (2**62, 3), (0, 1)),
    (0, (2**48, 2**48), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("offset", "size", "stride"), WRONG)
def test_c8_tensors_beyond_their_values(file: Path, offset: int, size: Any, stride: Any) -> None:
    with pytest.raises(ValueError, match=r"tensor at byte|impossible shape"):
        loaded(file, plain(offset=offset, size=size, stride=stride))


def test_values_that_make_no_tensor(file: Path) -> None:
    typed = b"ctorch._tensor\n_rebuild_from_type_v2\n("
    for made in (
        typed + b"NN)NtR",
        typed + b"ctorch._tensor\n_rebuild_from_type_v2\nN)NtR",
        typed + b"ccollections\nOrderedDict\nN]NtR",
        typed + b"ctorch\nSize\nN)NtR",
    ):
        with pytest.raises(ValueError, match="a tensor of an unknown kind"):
            loaded(file, made)
    for size in (b"N", b"K\2"):
        broken = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"K\0" + size + b")\x89NtR"
        with pytest.raises(ValueError, match="no valid operands"):
            loaded(file, broken)


def test_roots_and_byte_orders(file: Path) -> None:
    with pytest.raises(ValueError, match="not little-endian"):
        loaded(file, b"N", byteorder=b"big")
    with pytest.raises(ValueError, match="up to 16"):
        loaded(file, b"N", byteorder=b"x" * 17)
    for parts in ({"a/data/0": b""}, {"a/data.pkl": b"N.", "b/x": b""}, {"data.pkl": b"N."}):
        file.write_bytes(archive(parts))
        refused(lambda: load_tensors(file), CheckpointError, file, "without data.pkl")


def test_the_size_of_a_pickle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_files.MAX_PICKLE_NBYTES == 67_108_864
    monkeypatch.setattr(torch_files, "MAX_PICKLE_NBYTES", 2)
    assert loaded(file, b"N") is None
    with pytest.raises(ValueError, match="3 bytes; expected up to 2"):
        loaded(file, b"]N")


def test_constants() -> None:
    for name in (
        *("bfloat16", "float32", "float8_e4m3fn", "int8", "uint16", "qint8", "quint8", "bool"),
        *("complex64", "strided", "sparse_coo", "contiguous_format", "preserve_format"),
        "channels_last",
    ):
        assert CONSTANT.fullmatch("torch." + name)
    for name in ("torch.load", "torchxbool", "torch.float", "torch.int", "torch.bool.x", "os.bool"):
        assert not CONSTANT.fullmatch(name)


def test_what_a_file_holds_is_named(file: Path) -> None:
    for made, said in (
        (plain(), "holds a tensor [2, 3]"),
        (b"ctorch\nSize\n)R", "holds a torch.Size"),
        (b"N", "holds a NoneType; expected a dict"),
    ):
        loaded(file, made)
        refused(lambda: load_tensors(file), CheckpointError, file, said)
    assert describe([]) == "a list"


def failing(error: Exception) -> Any:
    def read() -> None:
        raise error

    return read


def test_whatever_a_reader_raises_is_one_line(file: Path) -> None:
    for error, said in (
        (FileNotFoundError(2, "No such file"), "missing; copy the whole"),
        (OSError(5, "Input/output error"), "cannot read (Input/output error); check"),
        (OSError("odd"), "cannot read (odd); check"),
        (TypeError("odd"), "as plain tensors (odd); the"),
        (ValueError(""), "as plain tensors (ValueError); the"),
    ):
        refused(partial(guarded, file, failing(error)), CheckpointError, file, said)
    with pytest.raises(KeyError):
        guarded(file, failing(KeyError()))
    assert guarded(file, lambda: 7) == 7


def test_shards_beside_each_other(tmp_path: Path) -> None:
    halves = []
    for name, data in (("a", [[0.0, 1], [2, 3]]), ("b", [[4.0], [5]])):
        values = np.array(data, "<f4")
        (tmp_path / name).write_bytes(values.tobytes())
        halves.append(StoredTensor(SourceFile(tmp_path / name), name, "F32", values.shape, 0))
    table = joined(halves, axis=1)
    assert (table.shape, table.nbytes) == ((2, 3), 24)
    assert table.rows(0, 2).tolist() == [[0, 1, 4], [2, 3, 5]]
    assert joined(halves[:1], axis=1) is halves[0]
    lines = joined([StoredTensor(SourceFile(tmp_path / "b"), "b", "F32", (2,), 0)] * 2, axis=0)
    assert lines.shape == (4,)
    assert [lines.rows(at, at + 2).tolist() for at in range(4)] == [[4, 5], [5, 4], [4, 5], [5]]


def test_plain_python_pickles_are_values_too() -> None:
    kept: Any = {
        "a": [1, -2, 3.5, None, True],
        "b": ("x" * 300, b"y", {"c": 1 << 40}),
        "d": [[]] * 3,
    }
    for protocol in (3, 4, 5):
        assert value(pickle.dumps(kept, protocol)) == kept

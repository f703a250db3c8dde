"""Limits of what is read from files: what is just inside is taken, what is just outside refused."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import msgspec
import pytest
from contract import refused

from stem_edge import bundle, config, edit_file, gguf_file, shards, token_index, zarr_json
from stem_edge.edit_file import Edit, NewRows, Replacement, encode_edit, read_edit
from stem_edge.errors import BundleError, EditError
from stem_edge.gguf_file import read_gguf
from stem_edge.rows import RecordLayout
from stem_edge.table_store import TableFormat

LAYOUT = RecordLayout(records=2, layers=(0,), parts=((16,),), row_type="fp16")
HASH = "0" * 64


def test_limits_are_what_is_documented() -> None:
    """A limit that moves by accident is seen here; formats depend on them."""
    assert bundle.MAX_MANIFEST_NBYTES == 1_048_576
    assert zarr_json.MAX_JSON_NBYTES == 1_048_576
    assert (config.MAX_VOCAB, config.MAX_LAYERS) == (16_777_216, 256)
    assert config.MAX_PARAMETERS == 1_099_511_627_776
    assert (config.MAX_WIDTH, config.MAX_CONTEXT) == (1_048_576, 16_777_216)
    assert edit_file.MAX_NBYTES == 268_435_456
    assert edit_file.MAX_TEXT == 4096
    assert (gguf_file.MAX_HEADER_NBYTES, gguf_file.MAX_ALIGNMENT) == (67_108_864, 65_536)
    assert (gguf_file.MAX_KEYS, gguf_file.MAX_TENSORS) == (4096, 8192)
    assert (gguf_file.MAX_KEY_NBYTES, gguf_file.MAX_TENSOR_NAME_NBYTES) == (256, 63)
    assert (shards.CRC_NBYTES, shards.INDEX_ENTRY_NBYTES, token_index.ENTRY_NBYTES) == (4, 16, 4)


@pytest.mark.parametrize("more", [0, 1])
def test_the_size_of_a_zarr_json(tmp_path: Path, more: int) -> None:
    path = tmp_path / "zarr.json"
    path.write_bytes(b"{}".ljust(zarr_json.MAX_JSON_NBYTES + more))
    if more:
        refused(lambda: zarr_json.read_json(path), BundleError, path)
    else:
        assert zarr_json.read_json(path) == {}


@pytest.mark.parametrize(
    ("tokens", "records", "indexed", "valid"),
    [
        (1, 1, False, True),
        (0, 1, True, False),
        (2, 1, False, False),
        (2, 1, True, True),
        (config.MAX_VOCAB, 2, True, True),
        (config.MAX_VOCAB + 1, 2, True, False),
    ],
)
def test_the_tokens_of_a_table_store(tokens: int, records: int, indexed: bool, valid: bool) -> None:
    tables = msgspec.structs.replace(LAYOUT, records=records)
    made = {"tokens": tokens, "tables": tables, "indexed": indexed}
    if valid:
        assert TableFormat(**made).index_nbytes == (4 * tokens if indexed else 0)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match="token"):
            TableFormat(**made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({"records": config.MAX_VOCAB}, True),
        ({"records": config.MAX_VOCAB + 1}, False),
        ({"records": 0}, False),
        ({"layers": (config.MAX_LAYERS - 1,)}, True),
        ({"layers": (config.MAX_LAYERS,)}, False),
        ({"layers": (-1,)}, False),
        ({"layers": ()}, False),
        ({"layers": (1, 1)}, False),
        ({"parts": ((1,),)}, True),
        ({"parts": ((0,),)}, False),
        ({"parts": ()}, False),
        ({"parts": ((),)}, False),
    ],
)
def test_the_layout_of_records(change: dict[str, Any], valid: bool) -> None:
    if valid:
        assert msgspec.structs.replace(LAYOUT, **change).record_nbytes > 0
    else:
        with pytest.raises(ValueError, match=r"."):
            msgspec.structs.replace(LAYOUT, **change)


def write_gguf(path: Path, **parts: Any) -> Path:
    path.write_bytes(gguf_files.gguf(**parts))
    return path


def gguf_is(path: Path, valid: bool, *naming: str) -> None:
    if valid:
        read_gguf(path)
    else:
        refused(lambda: read_gguf(path), BundleError, path, *naming)


@pytest.mark.parametrize(("length", "valid"), [(0, False), (1, True), (256, True), (257, False)])
def test_the_length_of_a_key(tmp_path: Path, length: int, valid: bool) -> None:
    keys = [("k" * length, gguf_files.number(gguf_files.UINT8, 1))]
    gguf_is(write_gguf(tmp_path / "x.gguf", keys=keys), valid, "key")


@pytest.mark.parametrize(("length", "valid"), [(0, False), (1, True), (63, True), (64, False)])
def test_the_length_of_a_tensors_name(tmp_path: Path, length: int, valid: bool) -> None:
    tensors = [gguf_files.Tensor("t" * length, (8,), 0, 0)]
    path = write_gguf(tmp_path / "x.gguf", tensors=tensors, data=bytes(32))
    gguf_is(path, valid, "name of a tensor")


@pytest.mark.parametrize(
    ("alignment", "valid"),
    [(16, False), (32, True), (48, False), (1 << 16, True), (1 << 17, False)],
)
def test_the_alignment_of_tensors(tmp_path: Path, alignment: int, valid: bool) -> None:
    keys = [("general.alignment", gguf_files.number(gguf_files.UINT32, alignment))]
    tensors = [gguf_files.Tensor("t", (8,), 0, 0)]
    path = tmp_path / "x.gguf"
    write_gguf(path, keys=keys, tensors=tensors, data=bytes(32), alignment=alignment)
    gguf_is(path, valid, "general.alignment")


@pytest.mark.parametrize(("count", "valid"), [(4096, True), (4097, False)])
def test_the_number_of_keys(tmp_path: Path, count: int, valid: bool) -> None:
    value = gguf_files.number(gguf_files.UINT8, 1)
    path = write_gguf(tmp_path / "x.gguf", keys=[(f"k{n}", value) for n in range(count)])
    gguf_is(path, valid, "keys")


@pytest.mark.parametrize(("dimensions", "valid"), [(0, False), (1, True), (2, True), (3, False)])
def test_the_dimensions_of_a_tensor(tmp_path: Path, dimensions: int, valid: bool) -> None:
    sizes = (8, 1, 1)[:dimensions]
    tensors = [gguf_files.Tensor("t", sizes, 0, 0)]
    gguf_is(write_gguf(tmp_path / "x.gguf", tensors=tensors, data=bytes(32)), valid, "dimensions")


@pytest.mark.parametrize(("extra", "valid"), [(-1, False), (0, True), (1, False)])
def test_the_end_of_the_data(tmp_path: Path, extra: int, valid: bool) -> None:
    tensors = [gguf_files.Tensor("t", (8,), 0, 0)]
    gguf_is(write_gguf(tmp_path / "x.gguf", tensors=tensors, data=bytes(32 + extra)), valid)


@pytest.mark.parametrize("cut", range(24))
def test_a_header_that_is_cut_anywhere(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 0, 0))[:cut])
    gguf_is(path, valid=False)


def saved(tmp_path: Path, edit: Edit, old: bytes = b"", new: bytes = b"") -> Path:
    """A file with an edit, some of whose text was replaced; its checksum is right."""
    path = tmp_path / "x.edit"
    content = msgspec.json.decode(encode_edit(edit), type=dict[str, msgspec.Raw])["edit"]
    changed = bytes(content).replace(old, new) if old else bytes(content)
    digest = hashlib.sha256(changed).hexdigest().encode()
    head = b'{"format_version": 1, "sha256": "' + digest + b'", "edit": '
    path.write_bytes(head + changed + b"}\n")
    return path


REPLACED = Edit(made_for=HASH, layers=(1,), change=Replacement(source="Spain", target="b"))
NEW = Edit(made_for=HASH, layers=(1,), change=NewRows(rows={7: (b"",)}), scope="everywhere")


@pytest.mark.parametrize(
    ("edit", "old", "new", "valid"),
    [
        (REPLACED, b'"Spain"', b'"' + b"x" * 4096 + b'"', True),
        (REPLACED, b'"Spain"', b'"' + b"x" * 4097 + b'"', False),
        (REPLACED, b'"Spain"', b'"s"', True),
        (REPLACED, b'"Spain"', b'""', False),
        (REPLACED, HASH.encode(), HASH.encode() + b"0", False),
        (REPLACED, HASH.encode(), HASH.encode()[1:], False),
        (REPLACED, HASH.encode(), b"g" + HASH.encode()[1:], False),
        (NEW, b'"7"', b'"2147483647"', True),
        (NEW, b'"7"', b'"2147483648"', False),
        (NEW, b'"7"', b'"0"', True),
        (NEW, b'"7"', b'"-1"', False),
        (NEW, b'"everywhere"', b'"positions"', False),
    ],
)
def test_the_fields_of_an_edit(
    tmp_path: Path, edit: Edit, old: bytes, new: bytes, valid: bool
) -> None:
    path = saved(tmp_path, edit, old, new)
    if valid:
        assert read_edit(path).made_for == HASH
    else:
        refused(lambda: read_edit(path), EditError, path)


@pytest.mark.parametrize(("version", "valid"), [(0, False), (1, True), (2, False)])
def test_the_version_of_an_edit(tmp_path: Path, version: int, valid: bool) -> None:
    path = saved(tmp_path, REPLACED)
    path.write_bytes(
        path.read_bytes().replace(b'"format_version": 1', b'"format_version": %d' % version)
    )
    read: Callable[[], object] = lambda: read_edit(path)
    if valid:
        read()
    else:
        refused(read, EditError, path, str(version))


def test_an_index_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "zarr.json").write_bytes(b"{}")
    message = refused(lambda: token_index.read_index(tmp_path, 2, 2), BundleError)
    assert message.startswith(f"{tmp_path / 'zarr.json'}: ")

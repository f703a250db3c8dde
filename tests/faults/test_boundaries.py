"""Limits of what is read from files: what is just inside is taken, what is just outside refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from contract import judged, refused, takes

from stem_edge import bundle, config, edit_file, shards, token_index, zarr_json
from stem_edge.edit_file import Edit, NewRows, Replacement, encode_edit, read_edit
from stem_edge.errors import BundleError, EditError

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
    assert (shards.CRC_NBYTES, shards.INDEX_ENTRY_NBYTES, token_index.ENTRY_NBYTES) == (4, 16, 4)


def test_the_size_of_a_zarr_json(tmp_path: Path) -> None:
    def read(nbytes: int) -> None:
        (tmp_path / "zarr.json").write_bytes(b"{}".ljust(nbytes))
        assert zarr_json.read_json(tmp_path / "zarr.json") == {}

    takes(read, zarr_json.MAX_JSON_NBYTES, "larger than")


def saved(tmp_path: Path, edit: Edit, old: bytes = b"", new: bytes = b"") -> Path:
    """A file with an edit, some of whose text was replaced; its checksum is right."""
    path = tmp_path / "x.edit"
    content = msgspec.json.decode(encode_edit(edit), type=dict[str, msgspec.Raw])["edit"]
    changed = bytes(content).replace(old, new) if old else bytes(content)
    digest = hashlib.sha256(changed).hexdigest().encode()
    head = b'{"format_version": 1, "sha256": "' + digest + b'", "edit": '
    path.write_bytes(head + changed + b"}\n")
    return path


SHA = HASH.encode()
REPLACED = Edit(made_for=HASH, layers=(1,), change=Replacement(source="Spain", target="b"))
NEW = Edit(made_for=HASH, layers=(1,), change=NewRows(rows={7: (b"",)}), scope="everywhere")


@pytest.mark.parametrize(
    ("edit", "old", "good", "bad"),
    [
        (REPLACED, b"Spain", [b"x" * 4096, b"s"], [b"x" * 4097, b""]),
        (REPLACED, SHA, [], [SHA + b"0", SHA[1:], b"g" + SHA[1:]]),
        (NEW, b'"7"', [b'"2147483647"', b'"0"'], [b'"2147483648"', b'"-1"']),
        (NEW, b'"everywhere"', [], [b'"positions"']),
    ],
)
def test_the_fields_of_an_edit(
    tmp_path: Path, edit: Edit, old: bytes, good: list[bytes], bad: list[bytes]
) -> None:
    for new in good:
        assert read_edit(saved(tmp_path, edit, old, new)).made_for == HASH
    for new in bad:
        path = saved(tmp_path, edit, old, new)
        refused(lambda path=path: read_edit(path), EditError, path)  # type: ignore[misc]


@pytest.mark.parametrize(("version", "valid"), [(0, False), (1, True), (2, False)])
def test_the_version_of_an_edit(tmp_path: Path, version: int, valid: bool) -> None:
    path = saved(tmp_path, REPLACED)
    named = b'"format_version": %d'
    path.write_bytes(path.read_bytes().replace(named % 1, named % version))
    judged(lambda: read_edit(path), valid, EditError, path, str(version))


def test_an_index_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "zarr.json").write_bytes(b"{}")
    message = refused(lambda: token_index.read_index(tmp_path, 2, 2), BundleError)
    assert message.startswith(f"{tmp_path / 'zarr.json'}: ")

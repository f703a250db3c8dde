"""Edit files: their exact bytes, how they are saved, and which bundles an edit fits."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from stem_edge.bundle.edit_files import file as edit_file
from stem_edge.bundle.edit_files.file import (
    Edit,
    check_edit,
    encode_edit,
    read_edit,
    tables_id,
)
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import EditError, InputError

MADE_FOR = "0123456789abcdef" * 4
EDIT = Edit(
    made_for=MADE_FOR, source="Spain", target="Germany", scheme="subset", pad=7, layers=(1, 2)
)
PLAIN = Edit(made_for=MADE_FOR, source='日本 "x"\n', target="é", layers=(0,))
GOLDEN = """\
{
 "format_version": 2,
 "layers": [
  1,
  2
 ],
 "made_for": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
 "pad": 7,
 "scheme": "subset",
 "scope": "positions",
 "source": "Spain",
 "target": "Germany"
}
"""


def read(folder: Path, data: bytes) -> Edit:
    path = folder / "an.edit"
    path.write_bytes(data)
    return read_edit(path)


def names(folder: Path) -> list[str]:
    """Names of all files in a folder, including hidden ones."""
    return sorted(path.name for path in folder.iterdir())


def test_the_bytes_of_a_file_are_these() -> None:
    assert encode_edit(EDIT).decode() == GOLDEN


@pytest.mark.parametrize("edit", [EDIT, PLAIN], ids=["replacement", "plain"])
def test_what_is_saved_is_read(edit: Edit, tmp_path: Path) -> None:
    edit.save(tmp_path / "one.edit")
    assert read_edit(str(tmp_path / "one.edit")) == edit
    assert (tmp_path / "one.edit").read_bytes() == encode_edit(edit)
    assert names(tmp_path) == ["one.edit"]


def test_every_changed_byte_is_refused_or_gives_an_edit(tmp_path: Path) -> None:
    data, rng = encode_edit(EDIT), random.Random(0)
    for at in range(len(data)):
        for other in {data[at] ^ 1, data[at] ^ 0x80, data[at] ^ 32, rng.randrange(256)}:
            try:
                found = read(tmp_path, data[:at] + bytes([other]) + data[at + 1 :])
            except EditError as error:
                assert "\n" not in str(error).replace(str(tmp_path), "")
            else:
                assert read(tmp_path, encode_edit(found)) == found


def test_a_file_at_the_limit_is_read_and_one_above_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "an.edit"
    EDIT.save(path)
    monkeypatch.setattr(edit_file, "MAX_NBYTES", len(encode_edit(EDIT)))
    assert read_edit(path) == EDIT
    monkeypatch.setattr(edit_file, "MAX_NBYTES", len(encode_edit(EDIT)) - 1)
    with pytest.raises(EditError, match="larger than"):
        read_edit(path)


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(28, "No space left on device"), InputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_save_that_ends_early_leaves_the_old_file_and_nothing_else(
    failing: str, failure: BaseException, raised: type[BaseException], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise failure

    path = tmp_path / "one.edit"
    EDIT.save(path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(raised) as caught:
        patch.setattr(failing, fail)
        PLAIN.save(path)
    if raised is InputError:
        assert "one.edit: cannot write" in str(caught.value)
        assert "No space left" in str(caught.value)
    assert (read_edit(path), names(tmp_path)) == (EDIT, ["one.edit"])


def test_places_that_cannot_be_written_are_named_and_long_names_can(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "none" / "one.edit", ""):
        with pytest.raises(InputError, match=r"cannot write this edit \([A-Z][\w ]+\);"):
            EDIT.save(place)
    assert not list((tmp_path / "folder").iterdir())
    for source in ("x" * 4097, "", "\udcff"):  # read_edit would refuse these
        with pytest.raises(InputError, match="cannot write this edit"):
            msgspec.structs.replace(EDIT, source=source).save(tmp_path / "two.edit")
    assert names(tmp_path) == ["folder"]
    EDIT.save(long := tmp_path / ("x" * 250 + ".edit"))  # as long as the system allows
    assert read_edit(long) == EDIT


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)  # 300 tokens, STEM layers 1 and 2


def test_bundles_that_differ_in_tables_or_tokenizer_have_other_ids(
    bundle: Bundle, tiny_gguf: Path
) -> None:
    manifest = bundle.manifest
    for name in ("tokenizer.json", "tables.zarr/zarr.json"):
        entry = msgspec.structs.replace(manifest.files[name], sha256="0" * 64)
        files = msgspec.structs.replace(manifest, files=manifest.files | {name: entry})
        assert tables_id(Bundle(bundle.path, files)) != tables_id(bundle)
    assert tables_id(open_bundle(tiny_gguf)) != tables_id(bundle)  # fp32 tables, not int8
    backbone = msgspec.structs.replace(manifest.files["backbone.onnx.data"], sha256="0" * 64)
    other = msgspec.structs.replace(
        manifest, files=manifest.files | {"backbone.onnx.data": backbone}
    )
    assert tables_id(Bundle(bundle.path, other)) == tables_id(bundle)


def test_what_does_not_fit_the_bundle_is_refused(bundle: Bundle) -> None:
    for pad, layers, message in [
        (300, (1,), "token 300; expected 0 to 299"),
        (None, (0,), "layer 0, which is not a STEM"),
        (None, (1, 3), "layer 3, which is not a STEM"),
    ]:
        made_for = tables_id(bundle)
        edit = Edit(made_for=made_for, source="a", target="b", pad=pad, layers=layers)
        with pytest.raises(EditError, match=message):
            check_edit(edit, bundle)

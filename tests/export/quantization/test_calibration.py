"""Texts and files of token ids that the exporter counts."""

from __future__ import annotations

import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from formats import export_as, format_with
from installed import ENGLISH
from tokenizers import Tokenizer

import stem_edge
from stem_edge.errors import InputError
from stem_edge.export.quantization import calibration as module
from stem_edge.export.quantization.calibration import judged_ids, read_token_ids
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.text import token_file

WHOLE = Path(module.__file__).with_name("calibration.txt")
BYTES = convert_tokenizer("bytes", None, add_bos=True)


def test_the_texts_are_those_that_exports_were_measured_on() -> None:
    """A folder that moves must not be renamed in them: the bytes of each default export would change."""
    assert [zlib.crc32(path.read_bytes()) for path in (WHOLE, ENGLISH)] == [3694919498, 2684808664]


def test_a_text_a_npy_and_raw_ids_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is built once, although a text is read in pieces."""
    library = Mock(wraps=Tokenizer)
    monkeypatch.setattr(module, "Tokenizer", library)
    monkeypatch.setattr(token_file, "READ_CHARS", 4)
    ids = list(b"one\ntwo\ntwo")
    (tmp_path / "a.txt").write_bytes(bytes(ids))
    np.save(tmp_path / "a.npy", np.array(ids))
    np.array(ids, "<i4").tofile(tmp_path / "a.int32")
    for name in ("a.txt", "a.npy", "a.int32"):
        assert read_token_ids(tmp_path / name, BYTES, 300).tolist() == ids
    library.from_str.assert_called_once()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.int32", np.array([1, 300], "<i4").tobytes(), "found 1 to 300"),
        ("a.int32", np.array([-1], "<i4").tobytes(), "found -1 to -1"),
        ("a.int32", b"", "found none"),
        ("a.txt", b"\xff\xfe", "cannot read"),
        ("a.npy", b"no npy", "cannot read"),
    ],
)
def test_files_that_are_no_token_ids(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_token_ids(tmp_path / name, BYTES, 300)


def test_without_a_text_it_is_the_one_that_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHIPPED", WHOLE)
    ids = read_token_ids(None, BYTES, 300)
    assert bytes(ids.tolist()) == WHOLE.read_bytes()
    assert 40_000 < len(ids) < 60_000
    assert bytes(judged_ids(ids, 4096)).isascii()  # plain English
    assert judged_ids(ids, 10) == ids[-10:].tolist()


def test_a_prefill_graph_that_is_less_exact_is_left_out(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An int8 backbone has one, because int8 in blocks is more exact than int8 by rows."""
    found = export_as(tiny_checkpoint, tmp_path / "a", format_with("int8"))
    assert not found.manifest.has_prefill
    assert "no prefill graph: its divergence" in found.manifest.report.notes[0]
    assert not list((tmp_path / "a").glob("prefill*"))
    assert set(stem_edge.verify(tmp_path / "a").values()) == {"ok"}
    asked = export_as(tiny_checkpoint, tmp_path / "b", format_with("int8"), prefill_graph=True)
    assert asked.manifest.has_prefill
    without = stem_edge.export_bundle(tiny_checkpoint, tmp_path / "c", prefill_graph=False)
    assert not without.manifest.has_prefill

"""Making edits: their contents, and requests that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import stem_edge
from stem_edge import make_edit
from stem_edge.bundle.edit_files.file import check_edit, tables_id
from stem_edge.bundle.edit_files.schemes import Scheme
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)  # tokens are bytes; 300 of them, STEM layers 1 and 2


def test_an_edit_is_made_for_its_bundle(bundle: Bundle) -> None:
    made = make_edit(bundle, " cat\n", "dog ", layers=[2])
    assert made == make_edit(str(bundle.path), "cat", "dog", layers=(2, 2))
    assert (made.made_for, made.layers, made.scope) == (tables_id(bundle), (2,), "positions")
    assert (made.source, made.target, made.scheme) == ("cat", "dog", "auto")
    check_edit(made, bundle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": " "}, "the source is ' '"), ({"target": ""}, "the target is ''"),
        ({"source": None}, "the source is None"),
        ({"target": "x" * 4097}, "the target has 4097 characters; expected up to 4096"),
        ({"source": "\udcff"}, "not valid Unicode"),
        ({"scheme": "best"}, "expected one of auto, swap"),
        ({"scope": "here"}, "expected one of positions, everywhere"),
        ({"scheme": "swap", "target": "mouse"}, "does not fit a source of 3 and a target of 5"),
        ({"scheme": "subset", "target": "at"}, "does not fit"),
        ({"scheme": "pad-left", "target": "mouse"}, "does not fit"),
        ({"layers": []}, "layers are none; expected STEM layers of 1,2"),
        ({"layers": [0]}, "layers are 0; expected STEM layers of 1,2"),
        ({"layers": ["1"]}, "layers is .* expected integers"),
        ({"layers": [1.0]}, "expected integers"),
        ({"scope": "everywhere", "source": "ada", "target": "cow"}, "twice"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_an_edit_is_refused(
    options: dict[str, Any], message: str, bundle: Bundle
) -> None:
    with pytest.raises(InputError, match=message):
        make_edit(bundle, **({"source": "cat", "target": "dog"} | options))


def test_numpys_integers_can_be_saved(bundle: Bundle, tmp_path: Path) -> None:
    numbers: Any = np.arange(3)
    made = make_edit(bundle, "cat", "mouse", scheme="subset", layers=numbers[1:])
    long = make_edit(bundle, "x" * 4096, "é" * 2048)  # the greatest length
    for one in (made, long):
        one.save(tmp_path / "one.edit")
        assert stem_edge.read_edit(tmp_path / "one.edit") == one


def changed(source: Bundle, **model: Any) -> Bundle:
    """Return the bundle with another description of its model."""
    described = msgspec.structs.replace(source.manifest.model, **model)
    return Bundle(source.path, msgspec.structs.replace(source.manifest, model=described))


def test_padding_is_the_begin_of_a_text_or_else_its_end(bundle: Bundle) -> None:
    model = bundle.manifest.model
    for made_for, pad in ((bundle, model.bos_id), (changed(bundle, bos_id=None), model.eos_ids[0])):
        assert make_edit(made_for, "cat", "ox").pad == pad


def test_without_begin_and_end_only_padding_schemes_are_refused(bundle: Bundle) -> None:
    copy = changed(bundle, bos_id=None, eos_ids=())
    schemes: tuple[Scheme, ...] = ("pad-left", "pad-right")
    for scheme in schemes:
        with pytest.raises(InputError, match="needs a padding token; name one"):
            make_edit(copy, "cat", "ox", scheme=scheme)
    make_edit(copy, "cat", "ox", scheme="copy")
    make_edit(copy, "cat", "dog")

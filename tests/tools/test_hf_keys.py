"""The keys of config.json that this package knows are those of the installed transformers."""

from __future__ import annotations

import hf_keys
import pytest
from packaging.version import Version

from stem_edge.export.checkpoints.hugging_face.keys import read_known_keys
from stem_edge.export.checkpoints.hugging_face.reader import KINDS
from stem_edge.export.checkpoints.hugging_face.stem_schema import MODEL_TYPE

RENEW = (
    "transformers {} knows more keys: see what they do there, run `python tools/hf_keys.py`, and read "
    "those that change what a model computes, or name them in HARMLESS (export/checkpoints/hugging_face/keys.py)"
)


def test_the_installed_transformers_knows_no_other_keys() -> None:
    """It may know fewer, if it gave some up."""
    installed, shipped = hf_keys.known_keys(), read_known_keys()
    if Version(installed.transformers) < Version(shipped.transformers):
        pytest.skip("older than the one whose keys are known")
    said = RENEW.format(installed.transformers)
    assert set(installed.generation) <= set(shipped.generation), said
    for kind in installed.models:
        more = installed.of(kind).items() - shipped.of(kind).items()
        assert not more, f"{said}: {kind}: {sorted(key for key, _ in more)}"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {MODEL_TYPE}))
def test_what_is_read_is_what_transformers_knows(kind: str) -> None:
    assert set(KINDS[kind].__struct_fields__) <= read_known_keys().of_text(kind).keys()

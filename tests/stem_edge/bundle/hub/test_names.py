"""Names of models: what is one, and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from stem_edge.bundle.hub.names import HubName, hub_name, name_of, shown_name
from stem_edge.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:org/name", HubName("org/name")),
        ("hf:org/name@main", HubName("org/name", "main")),
        ("hf:org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        (f"hf:o-1.x/N_2.b@{COMMIT}", HubName("o-1.x/N_2.b", COMMIT)),
        ("model", None),
        ("/models/hf:org/name", None),
        ("org/name", None),
    ],
)
def test_names_and_paths(text: str, expected: HubName | None) -> None:
    assert hub_name(text) == hub_name(Path(text)) == expected
    if expected is not None:
        assert str(expected) == text
        assert expected.pinned == text.endswith(COMMIT)


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:name", "hf:org/", "hf:/name", "hf:a/b/c", "hf:org/name@", "hf:org/..", "hf:or--g/name",
        "hf://org/name", "hf:org/na me", "hf:org/name@a..b", "hf:-org/name", "hf:org/name.", "hf:org/name@/x",
        "hf:org/name\n", "hf:" + "o" * 97 + "/name",
    ],
)  # fmt: skip
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected hf:org/name"):
        hub_name(text)


def test_folders_of_the_cache_have_names(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    assert name_of(folder) == HubName("org/name", COMMIT)
    assert shown_name(folder) == "org/name"
    for other in (
        folder / "tables.zarr",
        folder.parent,
        tmp_path / "snapshots" / COMMIT,
        Path("/"),
    ):
        assert name_of(other) is None
        assert shown_name(other) == other.name

"""Names of models on a hub: hf:org/name, or hf:org/name@revision."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stem_edge.bundle.hub import PREFIX
from stem_edge.errors import InputError
from stem_edge.files.hub_links import COMMIT, SNAPSHOTS

# Prefix of a repository's folder in the hub's cache, where -- stands for the slash of org/name.
REPOSITORIES = "models--"
_PART = r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]{0,94}[0-9A-Za-z_])?"
_REVISION = r"[0-9A-Za-z_](?:[0-9A-Za-z_./+-]{0,198}[0-9A-Za-z_+-])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_REVISION}))?")


@dataclass(frozen=True)
class HubName:
    """Name of a model on a hub. revision: a branch, tag or commit; None means the main branch."""

    repository: str  # like org/name
    revision: str | None = None

    @property
    def pinned(self) -> bool:
        """True if the revision is a full commit hash, so that the files never change."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> str:
        """Name of the repository's folder in the hub's cache."""
        return REPOSITORIES + self.repository.replace("/", "--")

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def hub_name(path: str | Path) -> HubName | None:
    """Parse a name like hf:org/name; return None for a path without hf:. Raises InputError."""
    return parsed_name(str(path)) if str(path).startswith(PREFIX) else None


def parsed_name(text: str) -> HubName:
    """Parse a name like org/name or hf:org/name@revision. Raises InputError."""
    found = _NAME.fullmatch(text.removeprefix(PREFIX).replace("\\", "/"))  # a Path on Windows
    if found is None or "--" in found[1] or ".." in found[0]:
        raise InputError(
            f"{text!r} is no name of a model; expected hf:org/name, hf:org/name@revision with a "
            "branch, a tag or a commit, or hf:org/name:FILE.gguf"
        )
    return HubName(found[1], found[2])


def meant_name(text: str) -> HubName | None:
    """Return the name that another program, or a browser, writes as org/name or hf.co/org/name."""
    with suppress(InputError):
        text = re.sub(r"(?i)^(hf:|(https?:/+)?(www\.)?(hf|huggingface)\.co/)", "", text)
        return parsed_name(re.sub("(/(tree|blob|resolve)/|:).*", "", text))
    return None


def name_of(folder: Path) -> HubName | None:
    """Return the hub name of a model's folder in the hub's cache; None for any other folder."""
    parts = folder.absolute().parts
    if len(parts) < 3 or parts[-2] != SNAPSHOTS or not COMMIT.fullmatch(parts[-1]):
        return None
    if not parts[-3].startswith(REPOSITORIES):
        return None
    organization, separator, name = parts[-3].removeprefix(REPOSITORIES).partition("--")
    return HubName(f"{organization}/{name}", parts[-1]) if separator else None


def shown_name(folder: Path) -> str:
    """Return a model's name for display: org/name if it is from a hub, else its folder's name."""
    name = name_of(folder.resolve())
    return (folder.name or folder.resolve().name) if name is None else name.repository

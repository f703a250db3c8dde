"""Error message for a path that is not a bundle: what is there instead, and what to do."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.hub.names import meant_name
from stem_edge.errors import BundleError

WORKING = ".stem-edge-"  # prefix + bundle name: the folder beside the bundle that an export writes
OLD = "-old"  # suffix of that folder: the replaced bundle, if the system cannot swap names


def no_bundle(manifest: Path) -> BundleError:
    """Return the error for a missing manifest.json; its message says what to do."""
    root = manifest.parent
    working = root.absolute().with_name(WORKING + root.absolute().name)
    if root.is_dir():
        said = f"not a bundle, it has no {manifest.name}; make one with: stem-edge export CHECKPOINT OUT"
    elif root.suffix == ".gguf" and root.is_file():
        said = (
            f"a GGUF file; make a bundle of it with: stem-edge export {root.name} OUT, or name the one "
            f"that stem-edge run made of it: {root.stem} (stem-edge list)"
        )
    elif working.with_name(working.name + OLD).is_dir():
        said = (
            "no such bundle folder; the export that was to replace it was cut off: run it again, "
            f"or rename {working.name}{OLD} to {root.name}"
        )
    elif working.is_dir():
        said = "its export is not finished; run stem-edge export again"
    else:
        file = ", but a file" if root.is_file() else ""
        kind = "file" if root.suffix == ".gguf" else "bundle folder"
        said = f"no such {kind}{file}; give the folder of an export, or a GGUF file{_or_on_a_hub(root)}"
    return BundleError(f"{root}: {said}")


def _or_on_a_hub(root: Path) -> str:
    """Return a hint like ", or hf:org/name" if the path may name a model on a hub; else ""."""
    if root.is_file():
        return ""
    if meant := meant_name(str(root)):
        return f", or {meant}"
    return "" if root.name != str(root) else ", or hf:org/name, or a name that stem-edge list shows"

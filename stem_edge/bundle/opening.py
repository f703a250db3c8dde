"""Open a bundle: check its manifest, and the existence and sizes of its files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stem_edge.bundle.manifest import MANIFEST, Manifest, is_shard, open_manifest
from stem_edge.errors import BundleError
from stem_edge.files.plain_files import check_file, check_folders, damaged
from stem_edge.graph.formats import GGUF, WEIGHT_BITS


class Bundle(msgspec.Struct, frozen=True, weakref=True):
    """Opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest
    tables: str | None = None  # URL of the table store if its shards are not in the folder

    def file(self, name: str) -> Path:
        """Path of one file of the bundle."""
        return self.path / name


def open_bundle(
    path: str | Path,
    tables: str | None = None,
    *,
    progress: bool | None = None,
) -> Bundle:
    """Open a bundle: check its manifest, and that every file is there in its exact size.

    path: the bundle's folder; or the short name of a cached bundle, as `stem-edge list` shows it; or
        a name on a model hub, hf:org/name or hf:org/name@revision. Missing files are fetched from the
        hub into its cache, and their sha256 is checked.
    tables: fsspec URL of the table store, if its shards are not in the folder. Then no shards are
        fetched.
    progress: show a bar on stderr while fetching. Default: if stderr is a terminal.

    Raises BundleError, HubError, InputError. The checksums of a local folder are checked only by
    `verify`, because hashing gigabytes at every start would take too long.
    """
    root = bundle_folder(path, shards=tables is None, progress=progress)
    manifest = open_manifest(root)
    shards = [name for name in manifest.files if is_shard(name)]
    lacking = tables is None and not any(os.path.lexists(root / name) for name in shards)
    folders = set[Path]()
    for name, entry in manifest.files.items():
        if (lacking or tables is not None) and is_shard(name):
            continue
        check_folders(root, root / name, folders)
        check_file(root / name, entry.nbytes)
    if lacking and shards:
        raise BundleError(
            f"{root / shards[0]}: missing, and so are all shards of the tables; if they are elsewhere, "
            "name their folder tables.zarr: --tables URL (tables= in Python); else the bundle is "
            "incomplete: copy or export it again"
        )
    _check_backbone(root, manifest)
    return Bundle(root, manifest, tables)


def bundle_folder(path: str | Path, *, shards: bool = True, progress: bool | None = None) -> Path:
    """Return the folder of a bundle; a bundle on a hub is fetched first.

    A path that does not exist may be the short name of a cached bundle (stem_edge.bundle.hub.kept).
    shards: False if the table shards are elsewhere, so that they are not fetched.
    """
    if os.path.lexists(path):
        return Path(path)
    from stem_edge.bundle.hub import PREFIX  # for names alone

    if not (name := str(path)).startswith(PREFIX):
        if os.sep in name or "/" in name:
            return Path(path)
        from stem_edge.bundle.hub.kept import named  # for such names alone

        if (kept := named(name)) is None or not kept.place.startswith(PREFIX):
            return Path(path) if kept is None else kept.folder
        path = kept.place
    from stem_edge.bundle.on_hub import fetched_folder  # for names on a hub alone

    return fetched_folder(str(path), shards=shards, progress=progress)


def _check_backbone(root: Path, manifest: Manifest) -> None:
    """Raise BundleError if the weight file is too small for the parameters in the manifest.

    This keeps later code from allocating arrays of false shapes. Opening the weights checks exact sizes.
    """
    parameters = manifest.model.backbone_parameters
    least = parameters * min(WEIGHT_BITS.values()) // 8
    if (found := manifest.files[manifest.format.files[0]].nbytes) < least:
        raise damaged(
            root / MANIFEST,
            f"a backbone of {parameters} parameters, but its weights for {manifest.format.engine} "
            f"have {found} bytes, expected at least {least}",
        )
    if manifest.gguf is not None:
        from stem_edge.ggml.gguf_schema import foreign_parts
        from stem_edge.ggml.gguf_tensors import locate

        if foreign := ", ".join(foreign_parts(manifest.model)):
            said = f"a backbone in {GGUF} with {foreign}, which only onnxruntime can run"
            raise damaged(root / MANIFEST, said)
        locate(root / GGUF, manifest.files[GGUF].nbytes, manifest.model, manifest.gguf.weights)

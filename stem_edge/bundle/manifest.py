"""Bundles: the folders that the exporter writes and the runtime reads.

    manifest.json           Manifest, below
    backbone.onnx.data      weights for onnxruntime, as stem_edge.graph.weight_plan lays them out
    backbone.onnx           a graph over them for other tools; nothing here reads it
    prefill.data            optional: int8 matrices for prompts
    backbone.gguf           weights for ggml, as stem_edge.ggml.gguf_schema describes them
    tables.zarr/            stem_edge.tables.store; a dense model has none
    tokenizer.json, tokenizer_config.json
    token_counts.npy        optional: stem_edge.tables.token_counts

A bundle has one backbone or both; they share everything else. manifest.json lists every other file
with its size and sha256. Unknown fields are refused, so that a bundle never means more than this
version understands; `format_version` grows when the meaning does. Opening compares all sizes, and
those of weights with what the model needs; checksums are left to checksums.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from stem_edge.bundle.fetched import Expected, fetch_checked
from stem_edge.bundle.quality_report import QualityReport, Size
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError, InputError
from stem_edge.files import disk
from stem_edge.files.names import check_names
from stem_edge.files.plain_files import PlainFolders, check_file, damaged, unreadable
from stem_edge.files.strict_json import decode_json, one_line
from stem_edge.ggml.gguf_schema import foreign_parts
from stem_edge.ggml.gguf_tensors import locate
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA, decoding, prompts
from stem_edge.graph.formats import WEIGHT_BITS, BackboneFormat, EngineName, GgufFormat
from stem_edge.hub.fetch import fetch, keep_ref, open_snapshot, remove
from stem_edge.hub.names import PREFIX, hub_name, name_of
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import RARE_RECORDS, RECORDS, TableFormat
from stem_edge.tables.token_index import INDEX
from stem_edge.units import MAX_SIZE

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
BACKBONE_GRAPH = "backbone.onnx"
GGUF = "backbone.gguf"
# Engine -> files of its backbone, the weights first.
BACKBONE_FILES: dict[EngineName, tuple[str, ...]] = {
    "onnxruntime": (BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA),
    "ggml": (GGUF,),
}
TABLES = "tables.zarr"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_COUNTS = "token_counts.npy"
WORKING = ".stem-edge-"  # before the bundle's name: the folder beside it in which an export grows
OLD = "-old"  # after that: the replaced bundle, where names cannot be swapped
MAX_MANIFEST_NBYTES = 1 << 20
# A tokenizer.json may be twice the largest that is published.
MAX_SMALL_NBYTES = {TOKENIZER: 64 << 20, TOKENIZER_CONFIG: 4 << 20}


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of one file of the bundle."""

    nbytes: Size
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of manifest.json."""

    format_version: int
    model: ModelConfig
    backbone: BackboneFormat | None = None  # for onnxruntime
    gguf: GgufFormat | None = None  # for ggml
    tables: RecordLayout | None  # of slots of the row cache; None: a dense model
    rare_tables: RecordLayout | None = None  # of rare tokens, if they have fewer bits
    indexed: bool = False  # if an index says which record a token has
    files: dict[str, FileEntry]  # path with forward slashes -> entry
    reports: dict[EngineName, QualityReport]  # of each backbone

    def __post_init__(self) -> None:
        model = self.model
        if not self.engines or set(self.reports) != set(self.engines):
            raise ValueError(f"backbones for {self.engines}, but reports of {tuple(self.reports)}")
        if (tables := self.table_format) is not None:
            _check_tables(model, tables.tables)
        elif model.stem_layers or self.rare_tables is not None or self.indexed:
            raise ValueError(
                f"no tables, but STEM layers {model.stem_layers}, rare tables or index"
            )
        check_names([MANIFEST, *self.files])
        if MANIFEST in self.files:
            raise ValueError(f"{MANIFEST} lists itself")
        if (total := self.nbytes) > MAX_SIZE:
            raise ValueError(f"files of {total} bytes in all; expected at most {MAX_SIZE}")
        for name in self.required_files():
            if name not in self.files:
                raise ValueError(f"no entry for {name}")

    @property
    def engines(self) -> tuple[EngineName, ...]:
        """Engines for which this bundle has a backbone."""
        kinds: dict[EngineName, object] = {"onnxruntime": self.backbone, "ggml": self.gguf}
        return tuple(name for name, format in kinds.items() if format is not None)

    @property
    def report(self) -> QualityReport:
        """Report of the first backbone."""
        return self.reports[self.engines[0]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.nbytes for entry in self.files.values())

    @property
    def has_prefill(self) -> bool:
        """True if prompts have a graph and matrices of their own."""
        return self.backbone is not None and self.backbone.prefill

    @property
    def table_format(self) -> TableFormat | None:
        """Format of the table store; None for a dense model."""
        if self.tables is None:
            return None
        return TableFormat(
            tokens=self.model.vocab_size,
            tables=self.tables,
            rare_tables=self.rare_tables,
            indexed=self.indexed,
        )

    def required_files(self) -> list[str]:
        """List the files that the bundle must have; shards are checked with the tables."""
        names = [TOKENIZER, TOKENIZER_CONFIG]
        names += [BACKBONE_GRAPH, BACKBONE_DATA] if self.backbone is not None else []
        names += [PREFILL_DATA] if self.has_prefill else []
        names += [GGUF] if self.gguf is not None else []
        if (tables := self.table_format) is not None:
            folders = [f"{TABLES}/{folder}" for folder in tables.folders()]
            names += [f"{folder}/zarr.json" for folder in (TABLES, *folders)]
            names += [f"{TABLES}/{INDEX}/c/0"] if tables.indexed else []
        return names


def _check_tables(model: ModelConfig, tables: RecordLayout) -> None:
    pairs = {
        "records": (model.records, tables.records),
        "STEM layers": (model.stem_layers, tables.layers),
        "parts of a row": (model.row_parts(), tables.parts),
    }
    for what, (of_model, of_tables) in pairs.items():
        if of_model != of_tables:
            raise ValueError(f"{what} of the model: {of_model}, but of the tables: {of_tables}")


class Bundle(msgspec.Struct, frozen=True):
    """Opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest
    tables: str | None = None  # URL of the table store whose shards are not in the folder

    def file(self, name: str) -> Path:
        """Path of one file of the bundle."""
        return self.path / name


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode manifest.json; the same manifest always gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def open_bundle(
    path: str | Path,
    tables: str | None = None,
    *,
    tables_later: bool = False,
    progress: bool | None = None,
) -> Bundle:
    """Open a bundle: check its manifest, and that every file is there in its exact size.

    path: its folder, or its name on a model hub, hf:org/name or hf:org/name@revision, from where it
        is fetched into the hub's cache, unless it is there. What was fetched is hashed.
    tables: URL of its table store, as fsspec takes it, if the folder lacks the shards, which are not
        fetched then.
    tables_later: leave the shards of a bundle from a hub there; Bundle.tables names them.
    progress: show a bar on stderr while fetching. Default: if stderr is a terminal.

    Raises BundleError, HubError, InputError. Checksums of a folder are left to `verify`, because
    hashing gigabytes at every start would take too long.
    """
    elsewhere = tables_later or tables is not None
    root = bundle_folder(path, tables_later=elsewhere, progress=progress)
    manifest = open_manifest(root)
    if tables_later and tables is None and manifest.tables is not None:
        tables = _tables_on_hub(root)
    shards = [name for name in manifest.files if is_shard(name)]
    lacking = tables is None and all(_is_missing(root / name) for name in shards)
    folders = PlainFolders(root)
    for name, entry in manifest.files.items():
        if (lacking or tables is not None) and is_shard(name):
            continue
        folders.check(root / name)
        check_file(root / name, entry.nbytes)
        # Their readers would refuse larger ones, but only after all of it was hashed.
        if entry.nbytes > (most := MAX_SMALL_NBYTES.get(name, MAX_SIZE)):
            raise damaged(root / name, f"{entry.nbytes} bytes found, expected at most {most}")
    if lacking and shards:
        raise BundleError(
            f"{root / shards[0]}: missing, and so are all shards of the tables; if they are elsewhere, "
            "name their folder tables.zarr: --tables URL (tables= in Python); else the bundle is "
            "incomplete: copy or export it again"
        )
    _check_backbones(root, manifest)
    return Bundle(root, manifest, tables)


def _is_missing(path: Path) -> bool:
    """Return whether nothing is there; what is in the way, or cannot be read, is another matter."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def bundle_folder(
    path: str | Path, *, tables_later: bool = False, progress: bool | None = None
) -> Path:
    """Return the folder of a bundle; one on a hub is fetched, as open_bundle says."""
    name = hub_name(path)
    if name is None:
        return Path(path)
    snapshot = open_snapshot(name, progress)
    if snapshot.lacking([MANIFEST]):
        if MANIFEST not in snapshot.listing:
            raise BundleError(
                f"{name}: not a bundle, it has no {MANIFEST}; make one with: stem-edge export {name} OUT"
            )
        fetch(snapshot, [MANIFEST])
    try:
        manifest = open_manifest(snapshot.folder)
    except BundleError:
        remove(snapshot, MANIFEST)  # otherwise a damaged one would stay for ever
        raise
    files = {
        file: Expected(entry.nbytes, entry.sha256)
        for file, entry in manifest.files.items()
        if not (tables_later and is_shard(file))
    }
    fetch_checked(snapshot, files)
    keep_ref(snapshot)
    return snapshot.folder


def _tables_on_hub(root: Path) -> str:
    """Return the URL, as fsspec takes it, of the tables of a bundle in the hub's cache."""
    name = name_of(root)
    if name is None:
        raise InputError(
            f"{root}: tables_later is for models on a hub, by their names (hf:org/name); leave it out"
        )
    return f"hf://{name.repository}@{name.revision}/{TABLES}"


def is_shard(name: str) -> bool:
    """Return whether a file of a bundle holds records, unlike descriptions and index."""
    arrays = (f"{TABLES}/{array}/c/" for array in (RECORDS, RARE_RECORDS))
    return name.startswith(tuple(arrays))


def _check_backbones(root: Path, manifest: Manifest) -> None:
    """Check that weight files have the size that the model needs, so that nothing later must.

    A model larger than its files is refused before its shapes size anything.
    """
    parameters = manifest.model.backbone_parameters
    least = parameters * min(WEIGHT_BITS.values()) // 8
    for engine in manifest.engines:
        if (found := manifest.files[BACKBONE_FILES[engine][0]].nbytes) < least:
            raise damaged(
                root / MANIFEST,
                f"a backbone of {parameters} parameters, but its weights for {engine} have {found} "
                f"bytes, expected at least {least}",
            )
    try:
        expected = weight_nbytes(manifest)
    except ValueError as error:
        raise damaged(
            root / MANIFEST, f"this model cannot be stored in this format ({error})"
        ) from error
    for name, nbytes in expected.items():
        if (found := manifest.files[name].nbytes) != nbytes:
            raise damaged(
                root / name, f"{found} bytes, but the weights of this model take {nbytes}"
            )
    if manifest.gguf is not None:
        _check_gguf(root, manifest, manifest.gguf)


def _check_gguf(root: Path, manifest: Manifest, gguf: GgufFormat) -> None:
    if foreign := foreign_parts(manifest.model):
        raise damaged(
            root / MANIFEST,
            f"a backbone in {GGUF} with {', '.join(foreign)}, which only onnxruntime can run",
        )
    locate(root / GGUF, manifest.files[GGUF].nbytes, manifest.model, gguf.weights)


def weight_nbytes(manifest: Manifest) -> dict[str, int]:
    """Weight file of onnxruntime -> its bytes. Raises ValueError if no graph can be built."""
    if manifest.backbone is None:
        return {}
    described = manifest.model, manifest.tables, manifest.backbone
    plans = [decoding(*described).plan]
    plans += [prompts(*described).plan] if manifest.has_prefill else []
    return {plan.file: plan.nbytes for plan in plans}


def open_manifest(root: str | Path) -> Manifest:
    """Read and check the manifest in a folder, without looking at other files."""
    path = Path(root) / MANIFEST
    try:
        data = disk.read_file(path, MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # NUL in a path
        raise _no_bundle(path.parent) from error
    except OSError as error:
        raise unreadable(path, "manifest", error) from error
    return parse_manifest(data, path)


def _no_bundle(root: Path) -> BundleError:
    """Error for a path without a manifest, perhaps because its export was cut off."""
    working = root.absolute().with_name(WORKING + root.absolute().name)
    if root.is_dir():
        said = f"not a bundle, it has no {MANIFEST}; make one with: stem-edge export CHECKPOINT OUT"
    elif root.suffix == ".gguf" and root.is_file():
        said = (
            "no such bundle folder, but a GGUF file; run a GGUF file with llama.cpp "
            f"(llama-cli -m {root.name}), or give the folder of a bundle, with --engine ggml"
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
        said = f"no such bundle folder{file}; give the folder of an export{_or_on_a_hub(root)}"
    return BundleError(f"{root}: {said}")


def _or_on_a_hub(root: Path) -> str:
    """Return words for what may be meant by org/name, or by HF:org/name."""
    with suppress(InputError):
        meant = hub_name(PREFIX + re.sub("^(?i:hf:)", "", str(root)))
        return "" if root.is_file() else f", or {meant}"
    return ""


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Parse a manifest. Raises BundleError, which names the path."""
    try:
        found = decode_json(data, _Version, MAX_MANIFEST_NBYTES).format_version
        if found == FORMAT_VERSION:
            return msgspec.json.decode(data, type=Manifest)
    except (ValueError, ArithmeticError) as error:
        reason = f"not a manifest of format {FORMAT_VERSION} ({one_line(error)})"
        raise damaged(path, reason) from error
    age, remedy = "newer", "upgrade stem-edge"
    if found < FORMAT_VERSION:
        export = f"stem-edge export CHECKPOINT {path.parent} --force"
        age, remedy = "older", f"export the checkpoint again with: {export}"
    raise BundleError(
        f"{path}: bundle format {found} is {age} than this stem-edge reads ({FORMAT_VERSION}); "
        f"{remedy}"
    )


class _Version(msgspec.Struct):
    """Fields that every format of the manifest has."""

    format_version: Annotated[int, msgspec.Meta(le=2**31 - 1)]

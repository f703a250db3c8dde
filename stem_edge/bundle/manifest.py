"""The bundle: the folder that the exporter writes and the runtime reads.

    manifest.json                     this module's Manifest
    backbone.onnx.data                the backbone for onnxruntime, as stem_edge.graph plans it
    backbone.onnx                     a graph over it for other tools; nothing here reads it
    prefill.data                      optional: int8 matrices for prompts
    backbone.gguf                     stem_edge.ggml.gguf_schema: the backbone for ggml
    tables.zarr/                          stem_edge.tables.store; a dense model has none
    tokenizer.json  tokenizer_config.json
    token_counts.npy                      optional: stem_edge.tables.token_counts

A bundle has one backbone or both; they share everything else. manifest.json lists every other file
with its size and sha256. Unknown fields are refused, so that a bundle never means more than this
version understands; `format_version` grows when the meaning does. Opening compares all sizes, those
of the weights with what the model's description says; stem_edge.bundle.checksums compares checksums as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from stem_edge.config import MAX_VOCAB, ModelConfig
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.names import check_names
from stem_edge.files.plain_files import PlainFolders, check_file, damaged, unreadable
from stem_edge.files.strict_json import decode_json, one_line
from stem_edge.ggml.gguf_tensors import locate
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA, decoding, prompts
from stem_edge.graph.formats import WEIGHT_BITS, BackboneFormat, EngineName, GgufFormat
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat
from stem_edge.tables.token_index import INDEX

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
BACKBONE_GRAPH = "backbone.onnx"
GGUF = "backbone.gguf"
# Engine -> what its backbone may be made of, its matrices first.
BACKBONE_FILES: dict[EngineName, tuple[str, ...]] = {
    "onnxruntime": (BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA),
    "ggml": (GGUF,),
}
TABLES = "tables.zarr"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_COUNTS = "token_counts.npy"
WORKING = ".stem-edge-"  # and the bundle's name: the folder in which an export grows, beside it
OLD = "-old"  # and after that: the bundle that it replaces, where names cannot be exchanged
MAX_MANIFEST_NBYTES = 1 << 20
# A tokenizer.json twice the largest of published models.
MAX_SMALL_NBYTES = {TOKENIZER: 64 << 20, TOKENIZER_CONFIG: 4 << 20}

# Counts of bytes: a damaged one must not reach arithmetic that cannot hold it.
MAX_NBYTES = 2**63 - 1
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCAB)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of one file of the bundle."""

    nbytes: Size
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KindError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantization error of one kind of tensor: |stored - original| / max |original| of the row."""

    worst: float
    mean: float


class QualityReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the export cost, measured while exporting."""

    checkpoint_nbytes: Size  # of the tensors that were read
    backbone_nbytes: Size
    tables_nbytes: Size
    errors: dict[str, KindError]
    probe_tokens: tuple[TokenId, ...]  # token ids of the logit comparison
    worst_logit_difference: float  # bundle against checkpoint, over all positions of the probe
    greatest_logit: float  # for scale
    # Mean Kullback-Leibler divergence, in nats, from the checkpoint's next-token distributions.
    divergence: float
    prefill_divergence: float | None = None  # the same through the prefill graph, if there is one
    # Mean divergence of the prefill graph from the graphs that decode, where it was exported.
    prefill_from_decode: Annotated[float, msgspec.Meta(ge=0)] | None = None
    # Of older bundles None: not measured.
    divergence_99: float | None = None  # 99th percentile of the divergence over the probe
    agreement: float | None = None  # share of the probe where the most probable token is the same
    notes: tuple[str, ...] = ()  # what the exporter found worth telling, a sentence each


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of manifest.json."""

    format_version: int
    model: ModelConfig
    backbone: BackboneFormat | None = None  # for onnxruntime
    gguf: GgufFormat | None = None  # for ggml
    tables: RecordLayout | None  # of a slot of the row cache; of a dense model: None
    rare_tables: RecordLayout | None = None  # of records of rare tokens, if they have fewer bits
    indexed: bool = False  # whether an index says which record a token has
    files: dict[str, FileEntry]  # path with forward slashes -> entry
    reports: dict[EngineName, QualityReport]  # of each backbone

    def __post_init__(self) -> None:
        model = self.model
        if not self.engines or set(self.reports) != set(self.engines):
            raise ValueError(f"backbones for {self.engines}, reports of {tuple(self.reports)}")
        if (tables := self.table_format) is not None:
            _check_tables(model, tables.tables)
        elif model.stem_layers or self.rare_tables is not None or self.indexed:
            raise ValueError(
                f"no tables, but STEM layers {model.stem_layers}, rare tables or index"
            )
        check_names([MANIFEST, *self.files])
        if MANIFEST in self.files:
            raise ValueError(f"file name {MANIFEST!r} is not a plain path inside the bundle")
        if (total := self.nbytes) > MAX_NBYTES:
            raise ValueError(f"files of {total} bytes in all; expected at most {MAX_NBYTES}")
        for name in self.required_files():
            if name not in self.files:
                raise ValueError(f"no entry for {name}")

    @property
    def engines(self) -> tuple[EngineName, ...]:
        """Engines that this bundle has a backbone for."""
        kinds: dict[EngineName, object] = {"onnxruntime": self.backbone, "ggml": self.gguf}
        return tuple(name for name, format in kinds.items() if format is not None)

    @property
    def report(self) -> QualityReport:
        """The report of the first backbone."""
        return self.reports[self.engines[0]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.nbytes for entry in self.files.values())

    @property
    def has_prefill(self) -> bool:
        """Whether there are matrices of their own for prompts."""
        return self.backbone is not None and self.backbone.prefill

    @property
    def table_format(self) -> TableFormat | None:
        """Everything about the table store; None of a dense model."""
        if self.tables is None:
            return None
        return TableFormat(
            tokens=self.model.vocab_size,
            tables=self.tables,
            rare_tables=self.rare_tables,
            indexed=self.indexed,
        )

    def required_files(self) -> list[str]:
        """Files without which the bundle is incomplete; shards follow from the tables."""
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
            raise ValueError(f"{what} of the model is {of_model}, of the tables {of_tables}")


class Bundle(msgspec.Struct, frozen=True):
    """An opened bundle: its folder and its checked manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Path of one file of the bundle."""
        return self.path / name


def encode_manifest(manifest: Manifest) -> bytes:
    """manifest.json as bytes: the same manifest gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle: strict manifest, every file present with its exact size.

    Raises BundleError. Checksums are left to `verify`: hashing gigabytes is not for every start.
    """
    root = Path(path)
    manifest = open_manifest(root)
    folders = PlainFolders(root)
    for name, entry in manifest.files.items():
        folders.check(root / name)
        check_file(root / name, entry.nbytes)
        # Whoever reads these refuses larger ones, but only after hashing all of them.
        if entry.nbytes > (most := MAX_SMALL_NBYTES.get(name, MAX_NBYTES)):
            raise damaged(root / name, f"{entry.nbytes} bytes found, expected at most {most}")
    _check_backbones(root, manifest)
    return Bundle(root, manifest)


def _check_backbones(root: Path, manifest: Manifest) -> None:
    """Weights are as many bytes as the model has: nothing later needs to look for their ends.

    A model that is larger than its files is refused before its shapes size anything.
    """
    parameters = manifest.model.backbone_parameters
    least = parameters * min(WEIGHT_BITS.values()) // 8
    for engine in manifest.engines:
        if (found := manifest.files[BACKBONE_FILES[engine][0]].nbytes) < least:
            raise damaged(
                root / MANIFEST,
                f"a model of {parameters} parameters outside of tables, but its backbone for "
                f"{engine} has {found} bytes, expected at least {least}",
            )
    try:
        expected = weight_nbytes(manifest)
    except ValueError as error:
        said = f"this model cannot be stored as it says ({error})"
        raise damaged(root / MANIFEST, said) from error
    for name, nbytes in expected.items():
        if (found := manifest.files[name].nbytes) != nbytes:
            said = f"{found} bytes, but the weights of this model take {nbytes}"
            raise damaged(root / name, said)
    if manifest.gguf is not None:
        locate(root / GGUF, manifest.files[GGUF].nbytes, manifest.model, manifest.gguf.weights)


def weight_nbytes(manifest: Manifest) -> dict[str, int]:
    """Weight file of onnxruntime -> its bytes. Raises ValueError if this model has no graph."""
    if manifest.backbone is None:
        return {}
    described = manifest.model, manifest.tables, manifest.backbone
    plans = [decoding(*described).plan]
    plans += [prompts(*described).plan] if manifest.has_prefill else []
    return {plan.file: plan.nbytes for plan in plans}


def tables_hash(files: Mapping[str, FileEntry]) -> str:
    """One sha256 of a bundle's table store: over a line `sha256  path` for each file, sorted by path."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith(TABLES + "/"):
            digest.update(f"{files[name].sha256}  {name}\n".encode())
    return digest.hexdigest()


def open_manifest(root: str | Path) -> Manifest:
    """The checked manifest of the bundle in a folder; its files are not looked at."""
    path = Path(root) / MANIFEST
    try:
        data = disk.read_file(path, MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # a name with a NUL
        raise _no_bundle(path.parent) from error
    except OSError as error:
        raise unreadable(path, "manifest", error) from error
    return parse_manifest(data, path)


def _no_bundle(root: Path) -> BundleError:
    """The error for a place without a manifest: an export may have been cut off."""
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
        said = "no such bundle folder; give the folder of an export"
    return BundleError(f"{root}: {said}")


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in these bytes. Raises BundleError, which names the path."""
    try:
        found = decode_json(data, _Version, MAX_MANIFEST_NBYTES).format_version
        if found == FORMAT_VERSION:
            return msgspec.json.decode(data, type=Manifest)
    except (ValueError, ArithmeticError) as error:
        said = f"not a manifest of format {FORMAT_VERSION} ({one_line(error)})"
        raise damaged(path, said) from error
    age, remedy = "newer", "upgrade stem-edge"
    if found < FORMAT_VERSION:
        age = "older"
        again = f"stem-edge export CHECKPOINT {path.parent} --force"
        remedy = f"export the checkpoint again with: {again}"
    raise BundleError(
        f"{path}: bundle format {found} is {age} than this stem-edge reads ({FORMAT_VERSION}); "
        f"{remedy}"
    )


class _Version(msgspec.Struct):
    """What every format of the manifest has in common."""

    format_version: Annotated[int, msgspec.Meta(le=2**31 - 1)]

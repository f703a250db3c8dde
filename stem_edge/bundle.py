"""The bundle: the folder that the exporter writes and the runtime reads.

    manifest.json                     this module's Manifest
    backbone.*.onnx  backbone.onnx.data   stem_edge.graph_io: the backbone for onnxruntime
    prefill.onnx  prefill.onnx.data       optional: int8 matrices for prompts
    backbone.gguf                     stem_edge.gguf_schema: the backbone for ggml
    tables.zarr/                          stem_edge.table_store; a dense model has none
    tokenizer.json  tokenizer_config.json
    token_counts.npy                      optional: stem_edge.token_counts

A bundle has one backbone or both; they share everything else. manifest.json lists every other file with its size and sha256. Unknown fields are refused, so that a
bundle never means more than this version understands; `format_version` grows when the meaning does.
Opening compares all sizes; stem_edge.checksums compares the checksums as well.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError
from stem_edge.graph_io import PREFILL, decode_graphs, graph_file
from stem_edge.quantize import MIN_BLOCK, fitting_block
from stem_edge.rows import RecordLayout
from stem_edge.table_store import TableFormat
from stem_edge.token_index import INDEX

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
BACKBONE_DATA = "backbone.onnx.data"
PREFILL_DATA = "prefill.onnx.data"
GGUF = "backbone.gguf"
TABLES = "tables.zarr"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_COUNTS = "token_counts.npy"
MAX_BLOCK = 256
MAX_MANIFEST_NBYTES = 1 << 20

# Counts of bytes: a damaged one must not reach arithmetic that cannot hold it.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
WeightType = Literal["fp32", "int8", "int4"]
WEIGHT_BITS: dict[WeightType, int] = {"fp32": 32, "int8": 8, "int4": 4}
# qkv are the three matrices before attention, stacked; project makes rows of low-rank tables.
MatrixKind = Literal["embedding", "head", "qkv", "wo", "gate", "up", "down", "project"]
MATRIX_KINDS: tuple[MatrixKind, ...] = get_args(MatrixKind)
VOCABULARY_KINDS: tuple[MatrixKind, ...] = ("embedding", "head")
QuantizerName = Literal["rtn", "search", "gptq"]
EngineName = Literal["onnxruntime", "ggml"]
# As llama.cpp names its mixtures of tensor types (stem_edge.gguf_schema).
GgufType = Literal["f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of one file of the bundle."""

    nbytes: Size
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class BackboneFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the backbone is stored."""

    weights: WeightType  # matrices of the layers
    head: WeightType  # embedding and head, the two matrices of V rows
    # Inputs that share a scale, at most; a narrow matrix uses less.
    block_size: Annotated[int, msgspec.Meta(ge=MIN_BLOCK, le=MAX_BLOCK)]
    kinds: dict[MatrixKind, WeightType] = {}  # those of another type than that
    asymmetric: bool = False  # whether each block has a zero point of its own
    quantizer: QuantizerName = "rtn"  # how the codes were chosen
    prefill: bool = False  # whether there is a graph of its own for prompts

    def type_of(self, kind: MatrixKind) -> WeightType:
        """Type of the matrices of a kind."""
        return self.kinds.get(kind, self.head if kind in VOCABULARY_KINDS else self.weights)

    def bits(self, kind: MatrixKind) -> int:
        """Bits of a value in the matrices of a kind."""
        return WEIGHT_BITS[self.type_of(kind)]

    @property
    def quantized(self) -> bool:
        """Whether any matrix is."""
        return any(self.bits(kind) < 32 for kind in MATRIX_KINDS)


class GgufFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the backbone for ggml is stored."""

    weights: GgufType
    importance: bool = False  # whether channels were weighted by a calibration text


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
    probe_tokens: tuple[int, ...]  # token ids of the logit comparison
    worst_logit_difference: float  # bundle against checkpoint, over all positions of the probe
    greatest_logit: float  # for scale
    # Mean Kullback-Leibler divergence, in nats, from the checkpoint's next-token distributions.
    divergence: float
    prefill_divergence: float | None = None  # the same through the prefill graph, if there is one
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
    rare_tables: RecordLayout | None = (
        None  # of the records of rare tokens, if they have fewer bits
    )
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
        for name in self.files:
            _check_name(name)
        for name in self.required_files():
            if name not in self.files:
                raise ValueError(f"no entry for {name}")
        backbone = self.backbone
        if backbone and backbone.quantized and not fitting_block(model.dim, backbone.block_size):
            raise ValueError(f"dim {model.dim} cannot be cut into blocks")

    @property
    def engines(self) -> tuple[EngineName, ...]:
        """Engines that this bundle has a backbone for."""
        kinds: dict[EngineName, object] = {"onnxruntime": self.backbone, "ggml": self.gguf}
        return tuple(name for name, format in kinds.items() if format is not None)

    @property
    def report(self) -> QualityReport:
        """Of the first of the backbones."""
        return self.reports[self.engines[0]]

    @property
    def has_prefill(self) -> bool:
        """Whether there is a graph of its own for prompts."""
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

    def graphs(self) -> list[str]:
        """Names of the graphs (stem_edge.graph_io) in the bundle, in their order."""
        if self.backbone is None:
            return []
        return decode_graphs(self.model) + ([PREFILL] if self.has_prefill else [])

    def required_files(self) -> list[str]:
        """Files without which the bundle is incomplete; shards follow from the tables."""
        names = [graph_file(graph) for graph in self.graphs()]
        names += [TOKENIZER, TOKENIZER_CONFIG]
        names += [BACKBONE_DATA] if self.backbone is not None else []
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
    for name, entry in manifest.files.items():
        check_file(root / name, entry.nbytes)
    return Bundle(root, manifest)


def open_manifest(root: str | Path) -> Manifest:
    """The checked manifest of the bundle in a folder; its files are not looked at."""
    path = Path(root) / MANIFEST
    data = _read_manifest(path)
    try:
        json.loads(data, object_pairs_hook=_refuse_repeats)  # msgspec would take the last one
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format_version")
        number = msgspec.json.decode(version, type=int) if version else 0
        if number > FORMAT_VERSION:
            raise BundleError(
                f"{path}: bundle format {number} is newer than this stem-edge reads "
                f"({FORMAT_VERSION}); upgrade stem-edge"
            )
        if number < FORMAT_VERSION:
            raise ValueError(f"format_version is {number}")
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{path}: not a manifest of format {FORMAT_VERSION} ({error}); export the bundle again"
        ) from error


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(names) > len(set(names)):
        raise ValueError(f"{max(names, key=names.count)!r} is there more than once")


def _read_manifest(path: Path) -> bytes:
    try:
        if not path.parent.is_dir():
            raise BundleError(f"{path.parent}: no such bundle folder; give the folder of an export")
        if not path.is_file():
            raise BundleError(
                f"{path.parent}: not a bundle, it has no {MANIFEST}; "
                "make one with: stem-edge export CHECKPOINT OUT"
            )
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_NBYTES + 1)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); check its permissions"
        ) from error
    if len(data) > MAX_MANIFEST_NBYTES:
        raise BundleError(
            f"{path}: larger than {MAX_MANIFEST_NBYTES} bytes; not a manifest: export again"
        )
    return data


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    plain = name.isprintable() and not set(name) & set("\\:") and name == "/".join(parts)
    if not plain or not parts or parts[0] == "/" or ".." in parts or name == MANIFEST:
        raise ValueError(f"file name {name!r} is not a plain path inside the bundle")


def check_file(path: Path, nbytes: int) -> None:
    """Raises BundleError unless a regular file of this size is there."""
    try:
        status = path.lstat()
    except OSError as error:
        raise BundleError(
            f"{path}: missing or unreadable ({error.strerror}), expected {nbytes} bytes; "
            "the bundle is incomplete: copy or export it again"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path}: not a regular file; copy the bundle as plain files")
    if status.st_size != nbytes:
        raise BundleError(
            f"{path}: {status.st_size} bytes found, {nbytes} expected; "
            "the file is cut or damaged: copy or export the bundle again"
        )

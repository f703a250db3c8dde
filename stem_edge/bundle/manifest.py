"""Manifest and files of a bundle, the folder that the exporter writes and the runtime reads.

A bundle has one backbone, for onnxruntime or for ggml. manifest.json lists all other files of the
bundle, with size and sha256. A manifest with unknown fields is refused, because this version would
misunderstand the bundle. `format_version` grows when the meaning of a manifest changes.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.names import KEY_CHARS
from stem_edge.files.plain_files import damaged, decode_json, unreadable
from stem_edge.graph.formats import (
    ASSISTANT_DATA,
    BACKBONE_DATA,
    BACKBONE_GRAPH,
    GGUF,
    PREFILL_DATA,
    Assistant,
    BackboneFormat,
    GgufFormat,
)
from stem_edge.limits import MAX_VOCAB
from stem_edge.sampling import Sampling
from stem_edge.shown import MAX_SIZE, one_line
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import INDEX, RARE_RECORDS, RECORDS, TableFormat

FORMAT_VERSION = 7
MANIFEST = "manifest.json"
TABLES = "tables.zarr"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_MANIFEST_NBYTES = 1 << 20
_ONE = (BACKBONE_DATA, BACKBONE_GRAPH, PREFILL_DATA, ASSISTANT_DATA, GGUF, TOKENIZER)
_ALL = "|".join(map(re.escape, (*_ONE, TOKENIZER_CONFIG)))
_ARRAYS = f"{RECORDS}|{RARE_RECORDS}|{INDEX}"
# All names of files that a bundle may have. Files with other names are not opened, fetched or pushed.
NAMES = re.compile(rf"{_ALL}|{TABLES}/(zarr\.json|({_ARRAYS})/(zarr\.json|c/[0-9]{{1,9}}(/0)?))")
# Bounded, because a damaged size must not overflow 64-bit arithmetic.
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCAB)]


def digest(*values: object) -> str:
    """Return a short hash of some values, as a name for a cached file."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:KEY_CHARS]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: Size
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class QualityReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Size and quality of a backbone, compared with its checkpoint on the text `probe_tokens`.

    `agreement` is the share of probe tokens after which both models have the same most probable token.
    """

    backbone_nbytes: Size
    tables_nbytes: Size
    probe_tokens: tuple[TokenId, ...] = ()  # empty: weights unchanged, and nothing was compared
    divergence: float = 0.0  # mean Kullback-Leibler divergence from the checkpoint, in nats
    prefill_divergence: float | None = None  # of the prefill graph, if the bundle has one
    divergence_99: float | None = None  # 99th percentile of the divergence over the probe
    agreement: float | None = None
    notes: tuple[str, ...] = ()  # remarks of the exporter, a sentence each


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format_version: int
    model: ModelConfig
    backbone: BackboneFormat | None = None  # for onnxruntime, or
    gguf: GgufFormat | None = None  # for ggml
    assistant: Assistant | None = None  # drafts for the backbone of onnxruntime
    # Layout of most records; None: a dense model.
    stored: RecordLayout | None = msgspec.field(name="tables")
    rare_tables: RecordLayout | None = None  # layout of rare tokens' records, if it differs
    indexed: bool = False  # True if an index maps token ids to records
    sampling: Sampling | None = None  # recommended by the model's makers
    files: dict[str, FileEntry]  # path with forward slashes -> entry
    report: QualityReport

    def __post_init__(self) -> None:
        model = self.model
        engines = [each.engine for each in (self.backbone, self.gguf) if each is not None]
        if len(engines) != 1:
            raise ValueError(f"backbones for {engines}; expected one")
        if (tables := self.table_format) is not None:
            _check_tables(model, tables.stored)
        elif model.stem_layers or self.rare_tables is not None or self.indexed:
            raise ValueError(
                f"no tables, but STEM layers {model.stem_layers}, rare tables or index"
            )
        if self.gguf is not None and not isinstance(self.gguf.weights, str):
            from stem_edge.ggml.gguf_schema import tensor_types  # for such bundles alone

            tensor_types(model, self.gguf.weights)
        if self.assistant is not None:
            if self.backbone is None:
                raise ValueError("an assistant, but no backbone for onnxruntime")
            from stem_edge.graph.special.assistant import lenders  # for such bundles alone

            lenders(self.assistant, model)
        if (other := next((n for n in self.files if not NAMES.fullmatch(n)), None)) is not None:
            raise ValueError(f"no bundle has a file called {other[:80]!a}")
        if (total := self.nbytes) > MAX_SIZE:
            raise ValueError(f"files of {total} bytes in all; expected at most {MAX_SIZE}")
        for name in self.required_files():
            if name not in self.files:
                raise ValueError(f"no entry for {name}")

    @property
    def format(self) -> BackboneFormat | GgufFormat:
        (found,) = [each for each in (self.backbone, self.gguf) if each is not None]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the bundle except the manifest."""
        return sum(entry.nbytes for entry in self.files.values())

    @property
    def has_prefill(self) -> bool:
        """True if a separate graph, with matrices of its own, processes prompts."""
        return self.backbone is not None and self.backbone.prefill

    @property
    def table_format(self) -> TableFormat | None:
        if self.stored is None:
            return None
        return TableFormat(
            tokens=self.model.table_ids,
            stored=self.stored,
            rare_tables=self.rare_tables,
            indexed=self.indexed,
        )

    @property
    def tables(self) -> RecordLayout | None:
        """Layout of table records in memory, all with one row type; None for a dense model."""
        return self.table_format.tables if self.table_format else None

    def required_files(self) -> list[str]:
        """Return the names of the files that the bundle must have, except the shards of tables."""
        names = [TOKENIZER, TOKENIZER_CONFIG]
        names += [BACKBONE_GRAPH, BACKBONE_DATA] if self.backbone is not None else []
        names += [PREFILL_DATA] if self.has_prefill else []
        names += [ASSISTANT_DATA] if self.assistant is not None else []
        names += [GGUF] if self.gguf is not None else []
        if (tables := self.table_format) is not None:
            folders = [f"{TABLES}/{folder}" for folder in tables.folders()]
            names += [f"{folder}/zarr.json" for folder in (TABLES, *folders)]
            names += [f"{TABLES}/{INDEX}/c/0"] if tables.indexed else []
        return names


def _check_tables(model: ModelConfig, tables: RecordLayout) -> None:
    pairs = {
        "records": (model.records, tables.records),
        "STEM layers": (model.row_layers, tables.layers),
        "parts of a row": (model.row_parts(), tables.parts),
    }
    for what, (of_model, of_tables) in pairs.items():
        if of_model != of_tables:
            raise ValueError(f"{what} of the model: {of_model}, but of the tables: {of_tables}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode manifest.json; the same manifest always gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def is_shard(name: str) -> bool:
    """Return True if a file of a bundle holds table records, not metadata or an index."""
    arrays = (f"{TABLES}/{array}/c/" for array in (RECORDS, RARE_RECORDS))
    return name.startswith(tuple(arrays))


def open_manifest(root: str | Path) -> Manifest:
    """Read and check the manifest in a folder, but no other file. Raises BundleError."""
    path = Path(root) / MANIFEST
    try:
        data = disk.read_file(path, MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # NUL in a path
        from stem_edge.bundle.absent import no_bundle

        raise no_bundle(path) from error
    except OSError as error:
        raise unreadable(path, "manifest", error) from error
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Parse the bytes of manifest.json. Raises BundleError, which names `path`."""
    try:
        found = decode_json(data, _Version, MAX_MANIFEST_NBYTES).format_version
        if found == FORMAT_VERSION:
            return DECODER.decode(data)
    except (ValueError, ArithmeticError) as error:
        reason = f"not a manifest of format {FORMAT_VERSION} ({one_line(error)})"
        raise damaged(path, reason) from error
    raise BundleError(
        f"{path}: bundle format {found}, expected {FORMAT_VERSION}; upgrade stem-edge, or export the "
        f"checkpoint again with: stem-edge export CHECKPOINT {path.parent} --force"
    )


class _Version(msgspec.Struct):
    """The only field of the manifest that is in all versions of the format."""

    format_version: Annotated[int, msgspec.Meta(le=2**31 - 1)]


# Made on import, while commands hold Ctrl-C: msgspec crashes if it is interrupted while it reads these types.
DECODER = msgspec.json.Decoder(Manifest)

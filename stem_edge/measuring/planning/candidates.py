"""Models at a path that a user gave: a bundle, or a checkpoint and the bundles it could become."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.on_hub import NoBundleError
from stem_edge.bundle.opening import bundle_folder
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName, GgufFormat
from stem_edge.hub.names import hub_name
from stem_edge.runtime.backends.engines import ENGINES, engine_names
from stem_edge.runtime.backends.options import AUTO
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import make_layout
from stem_edge.tables.store import TableFormat

if TYPE_CHECKING:
    from stem_edge.export.checkpoints.checkpoint import Checkpoint


def model_folder(path: str | Path) -> Path:
    """Return the folder of a bundle or checkpoint; one on a hub (hf:org/name) is fetched.

    Raises HubError, BundleError, CheckpointError, InputError.
    """
    if hub_name(path) is None:
        return Path(path)
    try:
        return bundle_folder(path)
    except NoBundleError as error:
        from stem_edge.export.checkpoints.fetched import checkpoint_folder

        return checkpoint_folder(str(error.found))


def is_bundle(path: Path) -> bool:
    """Return whether a path is a bundle, not a checkpoint. Raises InputError if nothing is there."""
    if not path.exists():
        raise InputError(f"{path}: no such folder; give a bundle, or the folder of a checkpoint")
    return (path / MANIFEST).is_file()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint as stem-edge export does. Raises CheckpointError."""
    from stem_edge.export.checkpoints.readers import read_checkpoint

    return read_checkpoint(path)


def of_checkpoint(path: Path, engine: str) -> list[Footprint]:
    """Return the sizes of the bundles that an export could make for an engine, most exact first.

    Raises InputError, CheckpointError.
    """
    if engine not in engine_names():
        raise InputError(f"engine is {engine!r}; expected one of {', '.join(engine_names())}")
    source = open_checkpoint(path)
    config = source.config
    chosen = next(iter(ENGINES)) if engine == AUTO else engine
    if (kept := _of_own_types(source, ENGINES[chosen].name)) is not None:
        return [kept]
    found: list[Footprint] = ENGINES[chosen].planning.footprints(config, partial(_tables, config))
    return found if config.stem_layers else found[:-1]  # the last two differ only in their tables


def _of_own_types(source: Checkpoint, engine: EngineName) -> Footprint | None:
    """Return the sizes of the bundle that keeps a checkpoint's types; None if there are types to choose."""
    from stem_edge.export.backbone.gguf import check_runnable
    from stem_edge.export.job.job import kept_footprint
    from stem_edge.export.job.recipe import Recipe

    if engine == GgufFormat.engine:
        check_runnable(source)
    return kept_footprint(source, Recipe(engine=engine))


def _tables(config: ModelConfig, rows: RowType) -> TableFormat | None:
    if not config.stem_layers:
        return None
    group = 32 if rows == "int4" else 128
    shape = (config.records, config.row_layers, config.row_parts())
    layout = make_layout(*shape, rows, group, mixed=config.mixed_rows)
    indexed = config.stem_ffn == "hash-moe" or config.records < config.table_ids
    return TableFormat(tokens=config.table_ids, stored=layout, indexed=indexed)

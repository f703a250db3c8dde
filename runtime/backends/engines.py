"""Chooses and imports an engine by name: a folder beside this file with a module `loader`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stem_edge import __version__
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import ENGINES, EngineName
from stem_edge.runtime.backends.options import AUTO, LoadOptions

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import EngineLoader

ENGINE_NAMES = (AUTO, *ENGINES)


def choose_engine(bundle: Bundle, wanted: str) -> EngineName:
    """Return the engine for a bundle; "auto" means the engine that the bundle was exported for.

    Raises InputError for an unknown name, BackendError if the bundle lacks that engine's backbone.
    """
    own = bundle.manifest.format.engine
    if wanted in (AUTO, own):
        return own
    if wanted not in ENGINES:
        raise InputError(f"engine is {wanted!r}; expected one of {', '.join(ENGINE_NAMES)}")
    raise BackendError(
        f"{bundle.path}: no backbone for {wanted}, only for {own}; make a bundle for it with: "
        f"stem-edge export CHECKPOINT OUT --engine {wanted}"
    )


def loader_module(engine: str) -> str:
    return f"stem_edge.runtime.backends.{engine}.loader"


def loader(bundle: Bundle, engine: str, options: LoadOptions) -> EngineLoader:
    """Import an engine's library, and return a loader of a bundle.

    Raises InputError for options that the engine lacks, BackendError if it is not installed or cannot load the bundle.
    """
    module: Any = import_module(loader_module(engine))
    found: EngineLoader = module.loader(bundle, options)
    return found


def versions(engine: str) -> dict[str, str]:
    """Return package name -> version, for all packages that affect the results of an engine."""
    module: Any = import_module(loader_module(engine))
    tokenizers: Any = import_module("tokenizers")  # not before it is used
    found = {"stem-edge": __version__, "tokenizers": tokenizers.__version__}
    return found | {engine: module.version()}

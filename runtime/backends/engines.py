"""The list of engines: each entry names an engine and loads bundles, and imports its library late.

An engine is a folder with a module `loader`, and an entry in ENGINES. Everything else goes
through EngineEntry, EngineLoader, Slots, Backend and Needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from stem_edge import __version__
from stem_edge.bundle.manifest import digest, version_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.interface import Backend, StepCosts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

UNSET = (None, False, "cpu")  # values of options that ask for nothing of an engine


class EngineLoader(Protocol):
    """Loads a bundle on an engine."""

    name: str  # of the engine or provider, in messages

    @property
    def step_costs(self) -> StepCosts | None:
        """Costs of decoding steps, if they were measured; known after `prepare`."""

    def prepare(self) -> None:
        """Do the work that only a first load needs. It may change what `needs` returns."""

    def needs(self, context: int) -> Needs:
        """Return the memory needed for `context` tokens; may be called before `prepare`."""

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """Allocate row cache slots in this engine's format. A backbone that `open` loads reads them."""

    def open(self) -> Backend:
        """Load the backbone; it reads rows from the slots, if there are any. Raises BackendError."""


@dataclass(frozen=True)
class EngineEntry:
    """An engine. Its name is also the name of its folder, and names the engine in a manifest."""

    name: EngineName
    install: str  # command that installs it
    installed: Callable[[], bool]  # whether its library is; does not import it
    version: Callable[[], str]  # of the library; "" if it is not installed
    lacks: tuple[str, ...] = ()  # options of `load` that it does not have

    @property
    def folder(self) -> str:
        """Full name of the package with the engine's modules."""
        return f"stem_edge.runtime.backends.{self.name}"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of all packages that affect results: name -> version, "" if not installed."""
        found = {"stem-edge": __version__, "tokenizers": version_of("tokenizers")}
        return found | {self.name: self.version()}

    def loader(self, bundle: Bundle, options: LoadOptions) -> EngineLoader:
        """Import the engine's library, and return a loader of the bundle. The engine must have the options."""
        found: EngineLoader = import_module(f"{self.folder}.loader").loader(bundle, options)
        return found


def _ggml_is_installed() -> bool:
    from stem_edge.ggml.installed import library_path

    return library_path() is not None


def _version_of_ggml() -> str:
    from stem_edge.ggml.installed import library_files, library_path

    library = library_path()
    with suppress(OSError):
        return digest(*library_files(library)) if library is not None else ""
    return ""


ENGINES: dict[str, EngineEntry] = {
    entry.name: entry
    for entry in (
        EngineEntry(
            "onnxruntime",
            "pip install onnxruntime",
            lambda: bool(find_spec("onnxruntime")),
            lambda: version_of("onnxruntime"),
        ),
        EngineEntry(
            "ggml",
            "pip install 'stem-edge[gguf]' (it compiles for some minutes: docs/run.md)",
            _ggml_is_installed,
            _version_of_ggml,
            lacks=("provider", "device_memory"),
        ),
    )
}


def engine_names() -> tuple[str, ...]:
    """Return the values that the option `engine` accepts."""
    return (AUTO, *ENGINES)


def choose_engine(bundle: Bundle, wanted: str = AUTO) -> EngineName:
    """Return the engine for a bundle. For "auto", this is the engine that its backbone is made for.

    Raises InputError for an unknown name, BackendError if the bundle lacks that engine's backbone.
    """
    own = bundle.manifest.format.engine
    if wanted in (AUTO, own):
        return own
    if wanted not in ENGINES:
        raise InputError(f"engine is {wanted!r}; expected one of {', '.join(engine_names())}")
    raise BackendError(
        f"{bundle.path}: no backbone for {wanted}, only for {own}; make a bundle for it with: "
        f"stem-edge export CHECKPOINT OUT --engine {wanted}"
    )


def check_installed(bundle: Bundle, engine: str) -> None:
    """Raise BackendError if the chosen engine is not installed."""
    if not (chosen := ENGINES[engine]).installed():
        raise BackendError(
            f"{bundle.path}: {engine} is not installed; install it with: {chosen.install}"
        )


def loader(bundle: Bundle, engine: str, options: LoadOptions) -> EngineLoader:
    """Return a loader of a bundle for an engine.

    Raises InputError for options that the engine lacks, BackendError if it cannot load the bundle.
    """
    check_installed(bundle, engine)
    given, chosen = vars(options), ENGINES[engine]
    if absent := [name for name in chosen.lacks if given[name] not in UNSET]:
        raise InputError(
            f"{', '.join(absent)}: not supported by the engine in use, {engine}; leave it "
            "out, or choose another engine"
        )
    return chosen.loader(bundle, options)

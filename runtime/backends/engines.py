"""The list of engines, the choice of one for a bundle, and the interface of their loaders.

An engine is a module with a function `loaders` and an entry in ENGINES. Everything else goes
through EngineLoader, Slots, Backend and Needs. Its libraries are imported only once it is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from stem_edge.bundle.manifest import BACKBONES
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.verdicts import Verdict
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.interface import Backend, StepCosts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

AUTO = "auto"
T = TypeVar("T")


class EngineLoader(Protocol):
    """A way for an engine to load a bundle."""

    name: str  # tells the loaders of an engine apart in messages
    fills_while_opening: bool  # slots can be filled while the backbone is being opened
    step_tokens: int  # most tokens in a step; known once the backbone is open

    @property
    def step_costs(self) -> StepCosts | None:
        """Costs of decoding steps, if they were measured; known after `prepare`."""

    def prepare(self, verdict: Verdict | None) -> None:
        """Do the work that only a first load needs. verdict: of the bundle's trial."""

    def needs(self, context: int) -> Needs:
        """Return the memory needed for `context` tokens; may be called before `prepare`."""

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """Allocate slots in the form that this engine's graph reads."""

    def open(self, slots: Slots | None) -> Backend:
        """Load the backbone over these slots; a dense model has none.

        Raises BackendError; NotRunnableError if the engine's next loader may work instead.
        """


class OwnWays(Protocol):
    """Module of an engine with the ways of running that are its own: name -> options of `load`."""

    TILE: int  # tokens of a chunk from which other kernels round it otherwise
    FEW_SLOTS: tuple[int, int]  # the fewest slots to try, and some more

    def missing(self, cache_dir: str | Path | None) -> str:
        """Return why the library cannot run here; empty if it can."""

    def kernels(self, bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
        """Return kernels that round in the same way."""

    def ways(self, bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
        """Return further ways with these kernels."""


class NotRunnableError(BackendError):
    """A loader cannot run the bundle here; another loader of the engine may."""


class Engine(NamedTuple):
    """Facts about an engine that are known before it is imported."""

    backbone: EngineName  # the one it runs, by its name in the manifest
    module: str  # has loaders(bundle, options) -> list of EngineLoader, the preferred one first
    is_there: Callable[[], bool]  # must not import the library
    install: str  # command that installs it


def _ggml_is_there() -> bool:
    from stem_edge.ggml.installed import library_path

    return library_path() is not None


ENGINES: dict[str, Engine] = {
    "onnxruntime": Engine(
        "onnxruntime",
        "stem_edge.runtime.backends.onnxruntime.loader",
        lambda: find_spec("onnxruntime") is not None,
        "pip install onnxruntime",
    ),
    "ggml": Engine(
        "ggml",
        "stem_edge.runtime.backends.ggml.loader",
        _ggml_is_there,
        "pip install 'stem-edge[gguf]' (it compiles for some minutes: docs/engines.md)",
    ),
}


def engine_names() -> tuple[str, ...]:
    """Values of the option `engine`."""
    return (AUTO, *ENGINES)


def choose_engine(bundle: Bundle, wanted: str = AUTO) -> str:
    """Return the engine for a bundle; "auto" takes the first installed one with a backbone in it.

    Raises InputError for an unknown name, BackendError if the bundle lacks that engine's backbone.
    """
    present = bundle.manifest.engines
    fitting = [name for name, engine in ENGINES.items() if engine.backbone in present]
    if wanted == AUTO:
        return next((name for name in fitting if is_installed(name)), fitting[0])
    if wanted not in ENGINES:
        raise InputError(f"engine is {wanted!r}; expected one of {', '.join(engine_names())}")
    if wanted not in fitting:
        backbone = ENGINES[wanted].backbone
        raise BackendError(
            f"{bundle.path}: no backbone for {wanted} ({BACKBONES[backbone].files[0]}), only for "
            f"{' and '.join(present)}; add one with: stem-edge export CHECKPOINT {bundle.path} "
            f"--engine {BACKBONES[backbone].option} --add"
        )
    return wanted


def choose_backbone(bundle: Bundle, wanted: str = AUTO) -> EngineName:
    """Return the backbone that the chosen engine runs. Raises what choose_engine raises."""
    return ENGINES[choose_engine(bundle, wanted)].backbone


def is_installed(engine: str) -> bool:
    """Return whether the engine's library is installed, without importing it."""
    return ENGINES[engine].is_there()


def check_installed(bundle: Bundle, engine: str) -> None:
    """Raise BackendError if the chosen engine is not installed."""
    if is_installed(engine):
        return
    present = bundle.manifest.engines
    others = [n for n, e in ENGINES.items() if e.backbone in present and is_installed(n)]
    instead = f", or use {others[0]}, which is" if others else ""
    install = ENGINES[engine].install
    raise BackendError(
        f"{bundle.path}: {engine} is not installed; install it with: {install}{instead}"
    )


def loaders(bundle: Bundle, engine: str, options: LoadOptions) -> Sequence[EngineLoader]:
    """Return the engine's loaders for a bundle, the preferred one first.

    Raises InputError for options that the engine lacks, BackendError if it cannot load the bundle.
    """
    check_installed(bundle, engine)
    made: Sequence[EngineLoader] = import_module(ENGINES[engine].module).loaders(bundle, options)
    return made


def own_ways(engine: EngineName) -> OwnWays:
    """Return the ways of running that are an engine's own."""
    found: OwnWays = import_module(f"{__package__}.{engine}.ways")
    return found


def check_absent(engine: str, given: Mapping[str, object]) -> None:
    """Raise InputError if any of these options, name -> value, is set: the engine lacks them."""
    if names := [name for name, value in given.items() if value]:
        raise InputError(
            f"{', '.join(names)}: not supported by the engine in use, {engine}; leave it out, or "
            "choose another engine"
        )


def first_that_runs(
    bundle: Bundle, ways: Sequence[EngineLoader], load: Callable[[EngineLoader], T]
) -> T:
    """Return the result of `load` for the first loader that does not raise NotRunnableError."""
    reasons = []
    for way in ways:
        try:
            return load(way)
        except NotRunnableError as error:
            # Drop its advice, because it concerns one set of graphs; ours below covers them all.
            reason = str(error).replace(f"{bundle.path}{os.sep}", "").rsplit("; ", 1)[0]
            reasons.append(f"{way.name}: {reason}")
    raise BackendError(
        f"{bundle.path}: none of its graphs runs ({'; '.join(reasons)}); let the CPU run the "
        "missing operators (cpu as the last of providers), or run everything on the CPU"
    )

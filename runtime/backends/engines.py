"""Which engine runs a bundle, and what loading it needs of that engine.

An engine is a module with a function `loaders`, and a line in ENGINES. From there on everything goes
through EngineLoader, Slots, Backend and Needs; its libraries are imported only when it was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, TypeVar

from stem_edge.bundle.manifest import BACKBONE_FILES, Bundle
from stem_edge.bundle.verdicts import Verdict
from stem_edge.errors import BackendError, InputError
from stem_edge.ggml.library import INSTALL, library_path
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.interface import Backend
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.plan import Needs
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

AUTO = "auto"
T = TypeVar("T")
EXPORTED_BY: dict[EngineName, str] = {"onnxruntime": "--engine onnx", "ggml": "--engine gguf"}


class EngineLoader(Protocol):
    """One way of one engine to load one bundle."""

    name: str  # of the way, where there are several
    fills_while_opening: bool  # whether slots can be filled while the backbone is opened
    step_tokens: int  # that a step may have, once the backbone is open

    def prepare(self, verdict: Verdict | None) -> None:
        """Do what only a first load does. verdict: of the trial of the bundle."""

    def needs(self, context: int) -> Needs:
        """The memory for so many tokens; before `prepare`, as if that had been done."""

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """Slots in the form that its graph reads."""

    def open(self, slots: Slots | None) -> Backend:
        """The loaded backbone over these slots; a dense model has none.

        Raises BackendError, and NotRunnableError where another way may do.
        """


class NotRunnableError(BackendError):
    """This way of loading cannot run here; another may do."""


class Engine(NamedTuple):
    """What is known of an engine before it is imported."""

    backbone: EngineName  # that it runs, by its name in the manifest
    module: str  # has loaders(bundle, options) -> list of EngineLoader, in the order worth a try
    is_there: Callable[[], bool]  # nothing is loaded
    install: str  # how to get it


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
        lambda: library_path() is not None,
        f"{INSTALL} (it compiles for some minutes: docs/engines.md)",
    ),
}


def engine_names() -> tuple[str, ...]:
    """What can be chosen."""
    return (AUTO, *ENGINES)


def choose_engine(bundle: Bundle, wanted: str = AUTO) -> str:
    """The engine that runs a bundle; "auto": the first that it has a backbone for and is installed.

    Raises InputError for a name that is none, BackendError if the bundle has no such backbone.
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
            f"{bundle.path}: no backbone for {wanted} ({BACKBONE_FILES[backbone][0]}), only for "
            f"{' and '.join(present)}; add one with: stem-edge export CHECKPOINT {bundle.path} "
            f"{EXPORTED_BY[backbone]} --add"
        )
    return wanted


def choose_backbone(bundle: Bundle, wanted: str = AUTO) -> EngineName:
    """The backbone that this engine runs. Raises as choose_engine."""
    return ENGINES[choose_engine(bundle, wanted)].backbone


def is_installed(engine: str) -> bool:
    """Whether the engine's library is there; nothing is loaded."""
    return ENGINES[engine].is_there()


def check_installed(bundle: Bundle, engine: str) -> None:
    """Raises BackendError if the engine that was chosen is not there."""
    if is_installed(engine):
        return
    fitting = (name for name, one in ENGINES.items() if one.backbone in bundle.manifest.engines)
    others = [name for name in fitting if is_installed(name)]
    instead = f", or leave it to {others[0]}" if others else ""
    raise BackendError(
        f"{bundle.path}: {engine} is not installed; install it with: {ENGINES[engine].install}{instead}"
    )


def loaders(bundle: Bundle, engine: str, options: LoadOptions) -> Sequence[EngineLoader]:
    """Ways of the engine to load a bundle, in the order worth a try.

    Raises InputError for options that the engine does not have, BackendError if there is no way.
    """
    check_installed(bundle, engine)
    made: Sequence[EngineLoader] = import_module(ENGINES[engine].module).loaders(bundle, options)
    return made


def check_absent(engine: str, given: Mapping[str, object]) -> None:
    """Raises InputError for options, name -> value, that the engine does not have."""
    if names := [name for name, value in given.items() if value]:
        raise InputError(
            f"{', '.join(names)}: {engine}, which this runs on, has no such option; leave it out, or "
            "choose another engine"
        )


def first_that_runs(
    bundle: Bundle, ways: Sequence[EngineLoader], load: Callable[[EngineLoader], T]
) -> T:
    """What `load` returns for the first way that it does not raise NotRunnableError for."""
    reasons = []
    for way in ways:
        try:
            return load(way)
        except NotRunnableError as error:
            # Its advice is for one graph; ours below is for all of them.
            reason = str(error).replace(f"{bundle.path}{os.sep}", "").rsplit("; ", 1)[0]
            reasons.append(f"{way.name}: {reason}")
    raise BackendError(
        f"{bundle.path}: none of its graphs runs ({'; '.join(reasons)}); let the CPU take what is "
        "lacking (cpu as the last of providers), or run it on the CPU alone"
    )

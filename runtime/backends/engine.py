"""An engine: what is known about it before its library is imported, and how it loads a bundle."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

from stem_edge import __version__
from stem_edge.bundle.manifest import BACKBONES, version_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.interface import Backend, StepCosts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

if TYPE_CHECKING:
    from stem_edge.runtime.backends.ways import EngineWays

T = TypeVar("T")


class EngineLoader(Protocol):
    """A way for an engine to load a bundle."""

    name: str  # tells the loaders of an engine apart in messages
    fills_while_opening: bool  # slots can be filled while the backbone is being opened
    step_tokens: int  # most tokens in a step; known once the backbone is open

    @property
    def step_costs(self) -> StepCosts | None:
        """Costs of decoding steps, if they were measured; known after `prepare`."""

    def prepare(self) -> None:
        """Do the work that only a first load needs."""

    def needs(self, context: int) -> Needs:
        """Return the memory needed for `context` tokens; may be called before `prepare`."""

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """Allocate slots in the form that this engine's graph reads."""

    def open(self, slots: Slots | None) -> Backend:
        """Load the backbone over these slots; None for a dense model.

        Raises BackendError; NotRunnableError if the engine's next loader may work instead.
        """


class Engine(ABC):
    """What a load asks of an engine; its methods import its modules, and `loaders` its library."""

    name: str
    backbone: EngineName  # the one it runs, by its name in the manifest
    module: str  # with its `loaders`
    install: str  # command that installs it
    lacks: tuple[str, ...] = ()  # options of `load` that it does not have

    @property
    @abstractmethod
    def installed(self) -> bool:
        """Whether its library is installed; does not import it."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what computes with it; name -> "" for what is not installed."""
        library = BACKBONES[self.backbone].library()
        found = {"stem-edge": __version__, "tokenizers": version_of("tokenizers")}
        return found | {self.backbone: library}

    def loaders(self, bundle: Bundle, options: LoadOptions) -> Sequence[EngineLoader]:
        """Return the loaders for a bundle, the preferred one first. Raises InputError, BackendError."""
        found: Sequence[EngineLoader] = import_module(self.module).loaders(bundle, options)
        return found

    @property
    @abstractmethod
    def ways(self) -> EngineWays:
        """What planning, measuring and checking know of it."""

    def check_lacks(self, options: Mapping[str, object]) -> None:
        """Raise InputError if any option, name -> value, is set that the engine lacks."""
        if absent := [name for name in self.lacks if options.get(name) not in (None, False)]:
            raise InputError(
                f"{', '.join(absent)}: not supported by the engine in use, {self.name}; leave it "
                "out, or choose another engine"
            )


class NotRunnableError(BackendError):
    """A loader cannot run the bundle here; another loader of the engine may."""


def first_that_runs(
    bundle: Bundle, candidates: Sequence[EngineLoader], load: Callable[[EngineLoader], T]
) -> T:
    """Return the result of `load` for the first loader that does not raise NotRunnableError."""
    reasons = []
    for loader in candidates:
        try:
            return load(loader)
        except NotRunnableError as error:
            # Drop its advice, because it concerns one set of graphs; ours below covers them all.
            reason = str(error).replace(f"{bundle.path}{os.sep}", "").rsplit("; ", 1)[0]
            reasons.append(f"{loader.name}: {reason}")
    raise BackendError(
        f"{bundle.path}: none of its graphs runs ({'; '.join(reasons)}); let the CPU run the "
        "missing operators (cpu as the last of providers), or run everything on the CPU"
    )

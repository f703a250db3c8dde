"""An engine: what is known about it before its library is imported, and how it loads a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from stem_edge import __version__
from stem_edge.bundle.manifest import BACKBONES, version_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.interface import Backend, StepCosts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.rows import RecordLayout

if TYPE_CHECKING:
    from stem_edge.runtime.backends.ways import EngineWays

UNSET = (None, False, "cpu")  # values of options that ask for nothing of an engine


class EngineLoader(Protocol):
    """A way for an engine to load a bundle."""

    name: str  # of the engine or provider, in messages
    fills_while_opening: bool  # slots can be filled while the backbone is being opened

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
        """Load the backbone over these slots; None for a dense model. Raises BackendError."""


class Engine(ABC):
    """What a load asks of an engine; its methods import its modules, and `loader` its library."""

    name: str
    backbone: EngineName  # the one it runs, by its name in the manifest
    module: str  # with its `loader`
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

    def loader(self, bundle: Bundle, options: LoadOptions) -> EngineLoader:
        """Return what loads a bundle. Raises InputError, BackendError."""
        found: EngineLoader = import_module(self.module).loader(bundle, options)
        return found

    @property
    @abstractmethod
    def ways(self) -> EngineWays:
        """What planning, measuring and checking know of it."""

    def check_lacks(self, options: Mapping[str, object]) -> None:
        """Raise InputError if any option, name -> value, is set that the engine lacks."""
        if absent := [name for name in self.lacks if options.get(name) not in UNSET]:
            raise InputError(
                f"{', '.join(absent)}: not supported by the engine in use, {self.name}; leave it "
                "out, or choose another engine"
            )

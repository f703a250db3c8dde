"""The list of engines, and the choice of one for a bundle.

An engine is a folder with its own Engine, and a line in ENGINES. Everything else goes through Engine,
EngineWays, EngineLoader, Slots, Backend and Needs.
"""

from __future__ import annotations

from stem_edge.bundle.manifest import BACKBONES
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.engine import Engine, EngineLoader
from stem_edge.runtime.backends.ggml.engine import GgmlEngine
from stem_edge.runtime.backends.onnxruntime.engine import OnnxRuntimeEngine
from stem_edge.runtime.backends.options import AUTO, LoadOptions

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OnnxRuntimeEngine(), GgmlEngine())}


def engine_names() -> tuple[str, ...]:
    """Values of the option `engine`."""
    return (AUTO, *ENGINES)


def engines_of(bundle: Bundle) -> list[Engine]:
    """Return the engines that a bundle has a backbone for, the preferred one first."""
    return [one for one in ENGINES.values() if one.backbone in bundle.manifest.engines]


def choose_engine(bundle: Bundle, wanted: str = AUTO) -> str:
    """Return the engine for a bundle; "auto" takes the first installed one with a backbone in it.

    Raises InputError for an unknown name, BackendError if the bundle lacks that engine's backbone.
    """
    fitting = [engine.name for engine in engines_of(bundle)]
    if wanted == AUTO:
        return next((name for name in fitting if ENGINES[name].installed), fitting[0])
    if wanted not in ENGINES:
        raise InputError(f"engine is {wanted!r}; expected one of {', '.join(engine_names())}")
    if wanted not in fitting:
        backbone = BACKBONES[ENGINES[wanted].backbone]
        raise BackendError(
            f"{bundle.path}: no backbone for {wanted} ({backbone.files[0]}), only for "
            f"{' and '.join(bundle.manifest.engines)}; make a bundle for it with: "
            f"stem-edge export CHECKPOINT OUT --engine {backbone.engine}"
        )
    return wanted


def choose_backbone(bundle: Bundle, wanted: str = AUTO) -> EngineName:
    """Return the backbone that the chosen engine runs. Raises what choose_engine raises."""
    return ENGINES[choose_engine(bundle, wanted)].backbone


def check_installed(bundle: Bundle, engine: str) -> None:
    """Raise BackendError if the chosen engine is not installed."""
    chosen = ENGINES[engine]
    if chosen.installed:
        return
    others = [one.name for one in engines_of(bundle) if one.installed]
    instead = f", or use {others[0]}, which is" if others else ""
    raise BackendError(
        f"{bundle.path}: {engine} is not installed; install it with: {chosen.install}{instead}"
    )


def loader(bundle: Bundle, engine: str, options: LoadOptions) -> EngineLoader:
    """Return what loads a bundle on an engine.

    Raises InputError for options that the engine lacks, BackendError if it cannot load the bundle.
    """
    check_installed(bundle, engine)
    ENGINES[engine].check_lacks(vars(options))
    return ENGINES[engine].loader(bundle, options)

"""Which engine runs a bundle, and what loading it needs of that engine.

An engine is chosen here, once; from then on everything goes through Slots, Backend and MemoryPlan.
Its libraries are imported only when it was chosen.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, get_args

from stem_edge.bundle import Bundle, EngineName
from stem_edge.errors import BackendError, InputError
from stem_edge.ggml import INSTALL, library_path
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend import Backend
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.slots import Slots
from stem_edge.runtime.trial import try_first

EngineChoice = Literal["auto", "onnxruntime", "ggml"]
ENGINES: tuple[EngineChoice, ...] = get_args(EngineChoice)
BACKBONES: dict[EngineName, str] = {"onnxruntime": "backbone.*.onnx", "ggml": "backbone.gguf"}
EXPORTED_BY: dict[EngineName, str] = {"onnxruntime": "--engine onnx", "ggml": "--engine gguf"}


class EngineLoader(Protocol):
    """One engine about to load one bundle."""

    def describe(self, loading: Loading) -> Loading:
        """What this engine adds to what memory is planned from."""

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """Slots in the form that its graph reads."""

    def open(self, slots: Slots | None) -> Backend:
        """The loaded backbone over these slots; a dense model has none. Raises BackendError."""


def choose_engine(bundle: Bundle, wanted: EngineChoice) -> EngineName:
    """The engine that runs a bundle; "auto": the first that it has a backbone for and is installed.

    Raises InputError for a name that is none, BackendError if the bundle has no such backbone.
    """
    present = bundle.manifest.engines
    if wanted not in ENGINES:
        raise InputError(f"engine is {wanted!r}; expected one of {', '.join(ENGINES)}")
    if wanted == "auto":
        return next((name for name in present if is_installed(name)), present[0])
    if wanted not in present:
        raise BackendError(
            f"{bundle.path}: no backbone for {wanted} ({BACKBONES[wanted]}), only for "
            f"{' and '.join(present)}; add one with: stem-edge export CHECKPOINT {bundle.path} "
            f"{EXPORTED_BY[wanted]} --add"
        )
    return wanted


def is_installed(engine: EngineName) -> bool:
    """Whether the engine's library is there; nothing is loaded."""
    if engine == "ggml":
        return library_path() is not None
    return find_spec("onnxruntime") is not None


def check_installed(bundle: Bundle, engine: EngineName) -> None:
    """Raises BackendError if the engine that was chosen is not there."""
    if is_installed(engine):
        return
    install = "pip install onnxruntime"
    if engine == "ggml":
        install = f"{INSTALL} (it compiles for some minutes, see README)"
    others = [name for name in bundle.manifest.engines if is_installed(name)]
    instead = f", or leave it to {others[0]}" if others else ""
    raise BackendError(
        f"{bundle.path}: {engine} is not installed; install it with: {install}{instead}"
    )


def check_options(
    engine: EngineName, *, providers: list[str] | None, prefill_graph: bool | None, repack: bool
) -> None:
    """Raises InputError for options that the engine does not have."""
    if engine == "ggml" and (providers or prefill_graph):
        raise InputError(
            "providers and prefill_graph belong to onnxruntime, and this runs on ggml; leave them "
            "out, or choose engine onnxruntime"
        )
    if engine == "onnxruntime" and repack:
        raise InputError("repack belongs to ggml, and this runs on onnxruntime; leave it out")


def open_loader(
    bundle: Bundle,
    engine: EngineName,
    threads: int,
    *,
    providers: list[str] | None,
    prefill_graph: bool | None,
    prepare: bool,
    repack: bool,
    cache_dir: str | Path | None,
    progress: bool | None,
    trial: bool,
) -> EngineLoader:
    """The loader of an engine; arguments as of stem_edge.load.

    Raises InputError, BackendError, BundleError.
    """
    check_installed(bundle, engine)
    check_options(engine, providers=providers, prefill_graph=prefill_graph, repack=repack)
    if trial:  # before any native code of this process sees the bundle
        try_first(bundle, engine, cache_dir, progress)
    if engine == "ggml":
        from stem_edge.runtime.loading_ggml import GgmlLoader

        return GgmlLoader(bundle, threads, repack=repack, cache_dir=cache_dir)
    from stem_edge.runtime.loading_ort import OrtLoader

    return OrtLoader(
        bundle,
        threads,
        providers=providers,
        prefill_graph=prefill_graph,
        prepare=prepare,
        cache_dir=cache_dir,
        progress=progress,
    )

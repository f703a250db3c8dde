"""Which engine runs a bundle, and what loading it needs of that engine.

An engine is chosen here, once; from then on everything goes through Slots, Backend and MemoryPlan.
Its libraries are imported only when it was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.formats import EngineName
from stem_edge.ggml import INSTALL, library_path
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend import Backend
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.slots import Slots
from stem_edge.runtime.trial import try_first
from stem_edge.verdicts import Verdict

if TYPE_CHECKING:
    from stem_edge.runtime.providers import Provider

EngineChoice = Literal["auto", "onnxruntime", "ggml"]
ENGINES: tuple[EngineChoice, ...] = get_args(EngineChoice)
# A provider, or several in their order; each may have options. See stem_edge.runtime.providers.
Providers: TypeAlias = str | Sequence[str | tuple[str, Mapping[str, object]]] | None
AUTO = "auto"  # as a provider: the first accelerator there is
T = TypeVar("T")
BACKBONES: dict[EngineName, str] = {"onnxruntime": "backbone.onnx.data", "ggml": "backbone.gguf"}
EXPORTED_BY: dict[EngineName, str] = {"onnxruntime": "--engine onnx", "ggml": "--engine gguf"}


class EngineLoader(Protocol):
    """One engine about to load one bundle."""

    fills_while_opening: bool  # whether slots can be filled while the backbone is opened
    step_tokens: int  # that a step may have, once the backbone is open

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
    engine: EngineName,
    *,
    providers: Providers,
    device_memory: int | str | None,
    prefill_graph: bool | None,
    repack: bool,
) -> None:
    """Raises InputError for options that the engine does not have."""
    if engine == "ggml" and (providers or prefill_graph or device_memory is not None):
        raise InputError(
            "providers, device_memory and prefill_graph belong to onnxruntime, and this runs on "
            "ggml; leave them out, or choose engine onnxruntime"
        )
    if engine == "onnxruntime" and repack:
        raise InputError("repack belongs to ggml, and this runs on onnxruntime; leave it out")


class LoaderOptions(NamedTuple):
    """Arguments of stem_edge.load that are for loaders."""

    threads: int
    providers: Providers
    provider_libraries: Mapping[str, str | Path] | None
    device_memory: int | str | None
    prefill_graph: bool | None
    prepare: bool
    repack: bool
    cache_dir: str | Path | None
    progress: bool | None
    trial: bool


def with_loader(
    bundle: Bundle, engine: EngineName, options: LoaderOptions, load: Callable[[EngineLoader], T]
) -> T:
    """What `load` returns for a loader of an engine that can run the bundle.

    On accelerators it may be called several times: which graphs a provider runs shows in running
    them. Raises InputError, BackendError, BundleError.
    """
    check_installed(bundle, engine)
    check_options(
        engine,
        providers=options.providers,
        device_memory=options.device_memory,
        prefill_graph=options.prefill_graph,
        repack=options.repack,
    )
    verdict = None
    if options.trial:  # before any native code of this process sees the bundle
        verdict = try_first(bundle, engine, options.cache_dir, options.progress)
    if engine == "ggml":
        from stem_edge.runtime.loading_ggml import GgmlLoader

        return load(
            GgmlLoader(bundle, options.threads, repack=options.repack, cache_dir=options.cache_dir)
        )
    return _with_onnxruntime(bundle, options, verdict, load)


def is_plain(
    wanted: Providers, resolved: Sequence[Provider], device_memory: int | str | None
) -> bool:
    """Whether the backbone runs on the CPU as it always does, and no part of it plays a device.

    "auto" with a limit for a device that is not there is no wish for that.
    """
    asked = device_memory is not None and wanted not in (AUTO, [AUTO], (AUTO,))
    return resolved[0].on_cpu and not asked


def _with_onnxruntime(
    bundle: Bundle,
    options: LoaderOptions,
    verdict: Verdict | None,
    load: Callable[[EngineLoader], T],
) -> T:
    from stem_edge.runtime.providers import resolve

    providers = resolve(options.providers, options.provider_libraries)
    if is_plain(options.providers, providers, options.device_memory):
        from stem_edge.runtime.loading_ort import OrtLoader

        loader = OrtLoader(
            bundle,
            options.threads,
            prefill_graph=options.prefill_graph,
            verdict=verdict,
            prepare=options.prepare,
            cache_dir=options.cache_dir,
            progress=options.progress,
        )
        return load(loader)
    from stem_edge.runtime.loading_device import device_loaders, first_that_runs

    if options.prefill_graph:
        raise InputError("prefill_graph is of the CPU; leave it out on an accelerator")
    loaders = device_loaders(bundle, options.threads, providers, options.device_memory)
    return first_that_runs(bundle, loaders, load)


def plan_on_device(
    bundle: Bundle,
    loading: Loading,
    providers: Providers,
    libraries: Mapping[str, str | Path] | None,
    device_memory: int | str | None,
) -> Loading:
    """What the first loader that with_loader tries adds on an accelerator; nothing on the CPU."""
    from stem_edge.runtime.providers import resolve

    resolved = resolve(providers, libraries)
    if is_plain(providers, resolved, device_memory):
        return loading
    from stem_edge.runtime.loading_device import device_loaders

    return device_loaders(bundle, loading.threads, resolved, device_memory)[0].describe(loading)

"""The loader of the onnxruntime engine on an execution provider, or on the CPU acting as a device."""

from __future__ import annotations

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.device.standard import graphs, obstacle
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.onnxruntime.device.backend import DeviceBackend
from stem_edge.runtime.backends.onnxruntime.device.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.device.needs import device_needs, device_weights_nbytes
from stem_edge.runtime.backends.onnxruntime.loaded import open_sessions
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of, separate, sources
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.shown import parse_size


class DeviceLoader:
    """Loads graphs of standard operators on an execution provider; see EngineLoader.

    Raises InputError for options that only the CPU has, BackendError if only the CPU can run the model.
    """

    step_costs, slots = None, ArraySlots

    def __init__(self, bundle: Bundle, options: LoadOptions, provider: Provider) -> None:
        if options.kv not in ("auto", "fp32"):
            raise InputError(
                f"kv is {options.kv!r}; keys and values on an accelerator are fp32: leave it out, or "
                "run it on the CPU"
            )
        manifest = bundle.manifest
        if why := obstacle(manifest.model, manifest.tables, format_of(bundle)):
            raise BackendError(
                f"{bundle.path}: this model has no graphs for {provider.name}: {why}; run it on "
                "the CPU"
            )
        self._bundle, self._threads = bundle, options.cpus
        self.name, self._provider = provider.name, provider
        self._footprint, limit = footprint_of(manifest), options.device_memory
        self._limit = None if limit is None else parse_size(limit)
        # Without the weights, because onnxruntime allocates their memory itself.
        arrays = (
            None if self._limit is None else self._limit - device_weights_nbytes(self._footprint)
        )
        self._memory = DeviceMemory(provider, arrays)

    def prepare(self) -> None:
        """Do nothing: providers prepare weights themselves at each load."""

    def needs(self, context: int) -> Needs:
        limit, shared = self._limit, self._memory.shared
        return device_needs(self._footprint, context, self.name, limit=limit, shared=shared)

    def open(self, slots: ArraySlots | None) -> DeviceBackend:
        manifest = self._bundle.manifest
        separate(self._bundle, prefill=False, kv="fp32")  # which checks the weights
        built = graphs(manifest.model, manifest.tables, format_of(self._bundle))
        found = sources(self._bundle, built)
        provider = None if self._provider is CPU else self._provider
        sessions = open_sessions(found, self._threads, provider)
        return DeviceBackend(manifest.model, sessions, slots, self._memory)

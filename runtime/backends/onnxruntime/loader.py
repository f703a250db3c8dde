"""The loader of the onnxruntime engine on the CPU, and the choice between CPU and device loader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.files.names import PREPARED, cache_folder
from stem_edge.graph import names as io
from stem_edge.graph.formats import Assistant
from stem_edge.runtime.backends.costs import Needs, StepCosts
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.system.memory import available_memory, memory_limit

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import EngineLoader
    from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import Prepacked
    from stem_edge.runtime.backends.onnxruntime.prepared.streaming import WeightStream

# Weights are not streamed if available memory is more than this multiple of what a step reads.
ROOMY = 2.0


def loader(bundle: Bundle, options: LoadOptions) -> EngineLoader:
    if options.provider == LoadOptions.provider and options.device_memory is None:
        return OrtLoader(bundle, options)
    from stem_edge.runtime.backends.onnxruntime.device.loader import DeviceLoader
    from stem_edge.runtime.backends.onnxruntime.providers.find import find_provider

    return DeviceLoader(bundle, options, find_provider(options.provider))


def version() -> str:
    return str(ort.__version__)


class OrtLoader:
    """Loads the backbone for the CPU. Maps repacked weights if an earlier load saved them; see EngineLoader."""

    name, slots = "cpu", ArraySlots

    def __init__(self, bundle: Bundle, options: LoadOptions) -> None:
        self._bundle, self._options = bundle, options
        self._footprint = footprint_of(bundle.manifest).with_kv(options.kv)
        self._prepared: Prepacked | None = None
        self._to_prepare, self._obstacle = False, ""  # why it cannot be prepared
        self._streams = False  # known once the backbone is open
        if options.weights != "prepared":
            return
        large, cache_dir = self._footprint.prepared_nbytes > 0, options.cache_dir
        if large or os.access(cache_folder(cache_dir) / PREPARED, os.R_OK):
            from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import find_prepared

            self._prepared = find_prepared(bundle, cache_dir, self._footprint.kv)
        if self._prepared is None and large:
            from stem_edge.runtime.backends.onnxruntime.prepared.deciding import obstacle

            self._obstacle = obstacle(bundle, self._footprint, options)
            self._to_prepare = not self._obstacle

    @property
    def step_costs(self) -> StepCosts | None:
        """Times of decoding steps with this number of threads, measured when repacked weights were saved; else None."""
        if self._prepared is None or self._streams:
            return None
        steps = self._prepared.record.steps
        return steps if steps is not None and steps.threads == self._options.cpus else None

    def prepare(self) -> None:
        """Save a large backbone with weights repacked for this processor, unless saved before; warn if that fails."""
        if self._to_prepare or self._obstacle:
            self._prepared, self._to_prepare = self._make(), False

    def _make(self) -> Prepacked | None:
        from stem_edge.runtime.backends.onnxruntime.prepared.preparing import make_or_warn

        return make_or_warn(self._bundle, self._options, self._footprint.kv, self._obstacle)

    def needs(self, context: int) -> Needs:
        bundle, threads, footprint = self._bundle, self._options.cpus, self._footprint
        prepared = self._to_prepare or self._prepared is not None
        if self._assistant is None:
            footprint = replace(footprint, assistant_nbytes=0)
        # The prefill graph is used unless its matrices would push those of decoding out of memory.
        together = footprint.step_nbytes + footprint.prefill_nbytes <= memory_limit()
        prefill = bundle.manifest.has_prefill and together
        drafts = prepared and bool(self._options.speculate)
        needs = cpu_needs(
            footprint, context, threads, prepared=prepared, prefill=prefill, drafts=drafts
        )
        if self._to_prepare:
            from stem_edge.runtime.backends.onnxruntime.prepared.deciding import preparing_needs

            needs = replace(needs, preparing=str(preparing_needs(footprint, threads)))
        return needs

    def open(self, slots: ArraySlots | None) -> OrtBackend:
        try:
            return self._opened(slots)
        except BackendError:
            if (damaged := self._prepared) is None:
                raise
            from stem_edge.runtime.backends.onnxruntime.prepared.preparing import remove

            remove(damaged.folder)
            if (made := self._make()) is None:
                raise
            self._prepared = made
        return self._opened(slots)

    def _opened(self, slots: ArraySlots | None) -> OrtBackend:
        prefill, kv, prepared = self.needs(1).prefill, self._footprint.kv, self._prepared
        bundle, graphs = self._bundle, dict[str, Path | GraphSource]()
        config, cpus = bundle.manifest.model, self._options.cpus
        if prepared is not None:
            graphs |= prepared.graph_sources(bundle, prefill=prefill, kv=kv)
        else:
            from stem_edge.runtime.backends.onnxruntime.saved_graphs import saved_graphs

            graphs |= saved_graphs(bundle, kv, self._options)
            if not prefill:
                graphs.pop(io.PREFILL, None)
        if (assistant := self._assistant) is not None:
            from stem_edge.runtime.backends.onnxruntime.assistant import source

            graphs[io.ASSISTANT] = source(bundle, assistant, kv)
        if prepared is None:
            backend = OrtBackend(config, graphs, slots, cpus, kv)
        else:
            more = prepared.apart_steps, prepared.give_back_read_pages
            rows = prepared.record.rows
            limited = self._options.memory is not None
            backend = OrtBackend(config, graphs, slots, cpus, kv, *more, rows=rows, sparing=limited)
            files = [one for n, one in graphs.items() if n != io.PREFILL and isinstance(one, Path)]
            if (stream := self._stream(files)) is not None:
                # The measured step costs no longer hold, so speculate="auto" drafts nothing.
                backend.loaded = replace(backend.loaded, stream=stream)
                stream.close_with(backend.loaded)
                self._streams = True
                if (assistant := self._assistant) is None:
                    backend.loaded.sessions.pop(io.ASSISTANT, None)
        backend.assistant = assistant
        return backend

    @property
    def _assistant(self) -> Assistant | None:
        """The draft model to load, or None. Until `prepare` has measured steps, speculate="auto" counts as True."""
        later = self._to_prepare and bool(self._options.speculate)
        loaded = later or self._options.guesses_ahead(self.step_costs)
        return self._bundle.manifest.assistant if loaded else None

    def _stream(self, graphs: Sequence[Path]) -> WeightStream | None:
        """Return a thread that reads some weights of `graphs` anew in each step; None if all weights fit in memory."""
        if available_memory() > ROOMY * self._footprint.step_nbytes:
            return None
        from stem_edge.runtime.backends.onnxruntime.prepared.streaming import open_stream

        return open_stream(graphs)

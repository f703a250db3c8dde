"""The loader of the onnxruntime engine on the CPU, and the choice between it and a device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import crowding, prefill_refusal, probe_tokens, tried
from stem_edge.errors import InputError
from stem_edge.graph import names as io
from stem_edge.graph.formats import Assistant
from stem_edge.runtime.backends.engine import EngineLoader
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.prefill_exactness import (
    cached_divergence,
    measured_divergence,
)
from stem_edge.runtime.backends.onnxruntime.prepared.looking import may_be_prepared
from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.rows.prefetch import ANY_NUMBER
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.memory import available_memory, memory_limit
from stem_edge.tables.rows import RecordLayout
from stem_edge.units import parse_size

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import Prepacked, PreparedPlace
    from stem_edge.runtime.backends.onnxruntime.prepared.streaming import WeightStream

# Free memory beside the weights that a step reads, from which on they stay.
ROOMY = 2.0
UNMEASURED = (
    "whether it is exact on this processor is measured when the backbone is prepared, or if it is small by a load "
    "with memory for it; prefill_graph=True uses it nevertheless"
)


def loaders(bundle: Bundle, options: LoadOptions) -> Sequence[EngineLoader]:
    """Return the loader for the CPU, or one for each variant of the graphs that a device may run.

    Raises InputError, BackendError.
    """
    providers = _chosen(options)
    # With "auto", `device_memory` does not emulate a device when none is found.
    asked = options.device_memory is not None and options.providers not in (AUTO, [AUTO], (AUTO,))
    if providers[0].on_cpu and not asked:
        return [OrtLoader(bundle, options)]
    from stem_edge.runtime.backends.onnxruntime.device.loader import device_loaders

    if options.prefill_graph:
        raise InputError("prefill_graph works only on the CPU; leave it out on an accelerator")
    made = device_loaders(bundle, options, providers)
    if not (fitting := [one for one in made if options.kv in ("auto", one.kv)]):
        raise InputError(
            f"kv is {options.kv!r}; keys and values on {providers[0].name} are "
            f"{' or '.join({one.kv: '' for one in made})}, as the activations are: leave it out, or "
            "run it on the CPU"
        )
    return fitting


def _chosen(options: LoadOptions) -> Sequence[Provider]:
    if options.providers is None and options.provider_libraries is None:
        return (CPU,)
    from stem_edge.runtime.backends.onnxruntime.providers.resolve import resolve  # few need it

    return resolve(options.providers, options.provider_libraries)


class OrtLoader:
    """Loads the graphs for the CPU, as they are or prepacked; see EngineLoader."""

    name = "cpu"
    fills_while_opening = True
    step_tokens = ANY_NUMBER

    def __init__(self, bundle: Bundle, options: LoadOptions) -> None:
        self._bundle, self._options = bundle, options
        self._kv = footprint_of(bundle.manifest, "onnxruntime").with_kv(options.kv).kv
        self._prepared: Prepacked | None = None
        self._may_prepare = options.prepare  # False once preparing has turned out impossible
        self._measured: float | None = None  # divergence of the prefill graph here, in nats
        self._was_measured = False
        self._streams = False  # known once the backbone is open

    @property
    def step_costs(self) -> StepCosts | None:
        """Costs that were measured when the backbone was prepared, with as many threads."""
        if self._prepared is None or self._streams:
            return None
        steps = self._prepared.record.steps
        return steps if steps is not None and steps.threads == self._options.cpus else None

    def prepare(self) -> None:
        """Prepack a large backbone, and compare the graphs of a small one, unless that was done before."""
        options, manifest = self._options, self._bundle.manifest
        if options.prefill_graph is None and tried(manifest) and probe_tokens(manifest):
            limit = memory_limit() if options.memory is None else parse_size(options.memory)
            self._measured = measured_divergence(self._bundle, options.cache_dir, limit)
            self._was_measured = True
        if self._options.prepare and self._place is not None:
            self._prepared = self._place.prepared or self._make(self._place)
        self._may_prepare = self._prepared is not None

    def _make(self, place: PreparedPlace) -> Prepacked | None:
        if place.record is not None or not place.is_worth_it:
            return None
        from stem_edge.runtime.backends.onnxruntime.prepared.preparing import (
            find_or_make,  # at first loads
        )

        given = self._options
        asked = given.cache_dir, given.cpus, given.progress, self._kv, given.memory
        return find_or_make(place, *asked)

    def needs(self, context: int) -> Needs:
        (prefill, refused), path = self._prompts(), self._bundle.path
        footprint = footprint_of(self._bundle.manifest, "onnxruntime").with_kv(self._kv)
        if self._assistant is None:
            footprint = replace(footprint, assistant_nbytes=0)
        threads = self._options.cpus
        prepared = self._will_be_prepared
        mapped = prepared or not self._options.pack
        guesses = prepared and bool(self._options.speculate)
        needs = cpu_needs(
            footprint, context, threads, prepared=mapped, prefill=prefill, guesses=guesses
        )
        if mapped and not prepared:
            from stem_edge.runtime.backends.onnxruntime.prepared.packable import unpacked

            needs = unpacked(needs)
        saving = "" if prepared else f", or keep the weights in a file: stem-edge prepare {path}"
        if prepared and self._prepared is None and self._found is None:
            from stem_edge.runtime.backends.onnxruntime.prepared.packable import preparing_needs

            needs = replace(needs, preparing=preparing_needs(footprint, threads))
        return replace(needs, prefill_refused=refused, saving=saving)

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        return ArraySlots(layout, count)

    def open(self, slots: Slots | None) -> OrtBackend:
        prefill, kv = self._prompts()[0], self._kv
        config = self._bundle.manifest.model
        sources = cpu_graphs if self._prepared is None else self._prepared.graph_sources
        graphs = dict(sources(self._bundle, prefill=prefill, kv=kv))
        if (assistant := self._assistant) is not None:
            from stem_edge.runtime.backends.onnxruntime.assistant import AssistedBackend, source

            graphs[io.ASSISTANT] = source(self._bundle, assistant, kv)
        for name, graph in graphs.items():
            if isinstance(graph, GraphSource):
                graphs[name] = graph._replace(packed=self._options.pack)
        if (prepared := self._prepared) is None:
            backend = OrtBackend(config, graphs, slots, self._options.cpus, kv)
        else:
            more = prepared.apart_steps, prepared.give_back_read_pages
            backend = OrtBackend(config, graphs, slots, self._options.cpus, kv, *more)
            files = [one for n, one in graphs.items() if n != io.PREFILL and isinstance(one, Path)]
            if (stream := self._stream(files)) is not None:
                # Costs of steps are others then, so `auto` guesses nothing.
                backend.loaded = replace(backend.loaded, stream=stream)
                stream.close_with(backend.loaded)
                self._streams = True
                if (assistant := self._assistant) is None:
                    backend.loaded.sessions.pop(io.ASSISTANT, None)
        return backend if assistant is None else AssistedBackend(backend, assistant)

    @property
    def _assistant(self) -> Assistant | None:
        """The assistant that is loaded, or as long as it is not known that guesses are exact, may be."""
        later = self._prepared is None and self._will_be_prepared and bool(self._options.speculate)
        loaded = later or self._options.guesses_ahead(self.step_costs)
        return self._bundle.manifest.assistant if loaded else None

    def _stream(self, graphs: Sequence[Path]) -> WeightStream | None:
        """Return what reads a part of the weights anew in each step, where not all fit into memory."""
        weights = footprint_of(self._bundle.manifest, "onnxruntime").step_nbytes
        if available_memory() > ROOMY * weights:
            return None
        from stem_edge.runtime.backends.onnxruntime.prepared.streaming import open_stream

        return open_stream(graphs)

    @property
    def _will_be_prepared(self) -> bool:
        if self._prepared is not None:
            return True
        return self._may_prepare and self._place is not None and self._place.is_worth_it

    @property
    def _found(self) -> Prepacked | None:
        return None if self._place is None else self._place.prepared

    @cached_property
    def _place(self) -> PreparedPlace | None:
        """Where the prepared backbone belongs; None where there is no need to look."""
        if not may_be_prepared(self._bundle.manifest, self._options.cache_dir):
            return None
        from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import place

        return place(self._bundle, self._options.cache_dir, self._kv)

    def _prompts(self) -> tuple[bool, str]:
        """Return whether the prefill graph takes prompts, and why not if something bars it.

        It does if asked for, otherwise if it is exact here, not known to be slower, and not too
        large to stay in memory beside the matrices that decode.
        """
        bundle, options, prepared = self._bundle, self._options, self._prepared
        if options.prefill_graph is not None or not bundle.manifest.has_prefill:
            return bool(options.prefill_graph and bundle.manifest.has_prefill), ""
        if prepared is None and self._may_prepare:
            prepared = self._found
        if prepared is not None and prepared.record.prefill is False:
            return False, ""
        measured = self._measured
        if (
            not self._was_measured
        ):  # as when planning without loading: an earlier load may have measured it
            measured = cached_divergence(bundle, options.cache_dir)
        if prepared is not None and prepared.record.prefill_from_decode is not None:
            measured = prepared.record.prefill_from_decode
        refused = prefill_refusal(bundle.manifest, measured)
        unknown = self._was_measured or not tried(bundle.manifest)
        if measured is None and unknown and not self._will_be_prepared:
            refused = UNMEASURED
        refused = refused or crowding(footprint_of(bundle.manifest, "onnxruntime"), memory_limit())
        return not refused, refused

"""Loading a bundle on an accelerator: the variant of its graphs that the provider can run.

Which one that is, nobody needs to know beforehand: each is opened so that no operator is left to the
CPU, and computes some tokens. The first that does is taken; what the others lacked is in the error if
none does. Kernels for many tokens are not trusted before they give what those for few give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.footprint import footprint_of
from stem_edge.graph.device_rows import DeviceRows
from stem_edge.graph.names import ROWS, Variant
from stem_edge.graph.variants import obstacle
from stem_edge.rows import RecordLayout
from stem_edge.runtime.agreement import FEW_TOKENS, agreeing_tokens
from stem_edge.runtime.backend import Backend, NotFiniteError
from stem_edge.runtime.backend_device import DeviceBackend
from stem_edge.runtime.backend_portable import PortableBackend
from stem_edge.runtime.device_memory import DeviceMemory
from stem_edge.runtime.device_slots import DeviceSlots
from stem_edge.runtime.graphs import GraphSource, format_of, variant_graphs
from stem_edge.runtime.machine import free_on_nvidia
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.plan_device import OnDevice, weights_nbytes
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.providers import Provider
from stem_edge.runtime.slots import ArraySlots, Slots
from stem_edge.units import parse_size

T = TypeVar("T")
# Half as wide where the provider can, then exact, then what needs least of it.
ACCELERATED: tuple[Variant, ...] = ("fp16", "fp32", "portable")
ON_CPU: tuple[Variant, ...] = ("fp32",)  # whose kernels compute in float32 in any case


class WrongStepsWarning(RuntimeWarning):
    """A provider computes many tokens at once wrongly, so prompts take more steps."""


class NotRunnableError(BackendError):
    """A provider cannot run one variant of the graphs; another may do."""


class DeviceLoader:
    """See stem_edge.runtime.engines.EngineLoader; one variant on one provider."""

    fills_while_opening = False  # both use the provider's queue

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        providers: Sequence[Provider],
        variant: Variant,
        device_memory: int | None,
    ) -> None:
        self._bundle, self._threads, self._providers = bundle, threads, tuple(providers)
        self.variant, self._limit = variant, device_memory
        self._memory = DeviceMemory(self.provider)
        self.step_tokens = ANY_NUMBER
        self._context = bundle.manifest.model.max_context

    @property
    def provider(self) -> Provider:
        """The first of them, whose memory it is about."""
        return self._providers[0]

    def describe(self, loading: Loading) -> Loading:
        """See EngineLoader.describe."""
        shared = self._memory.kind == "host"
        limit, self._context = self._limit, loading.context_length
        if limit is not None:  # onnxruntime takes the weights past us
            self._memory.limit = limit - weights_nbytes(footprint_of(self._bundle.manifest))
        if limit is None and self.provider.name == "cuda":
            limit = free_on_nvidia(self.provider.options.get("device_id", "0"))
        device = OnDevice(self.provider.name, self.variant, limit, self._limit is not None, shared)
        return dataclasses.replace(loading, device=device)

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        """See EngineLoader.make_slots."""
        if self.variant == "portable":
            return ArraySlots(layout, count)
        graph = self._graphs[ROWS]
        with self._refusing():
            session = open_session(graph, self._threads, self._providers)
            return DeviceSlots(DeviceRows(layout, self.variant), count, self._memory, session)

    def open(self, slots: Slots | None) -> Backend:
        """See EngineLoader.open. Raises NotRunnableError."""
        with self._refusing():
            backend = self._backend(slots)
            try:
                self.step_tokens = self._trusted_tokens(backend, slots)
            except BaseException:
                backend.close()
                raise
        if self.step_tokens < ANY_NUMBER:
            warnings.warn(
                f"{self.provider.name} computes many tokens in one step wrongly here: a prompt is "
                f"processed {FEW_TOKENS} tokens at a time, which takes longer",
                WrongStepsWarning,
                stacklevel=2,
            )
        return backend

    def _trusted_tokens(self, backend: Backend, slots: Slots | None) -> int:
        try:
            return agreeing_tokens(backend, slots, self._context)
        except NotFiniteError:
            if self.variant == "fp16":  # which ends at 65504: a wider type may do
                raise
            return ANY_NUMBER  # weights are damaged, as every step will say

    def _backend(self, slots: Slots | None) -> Backend:
        manifest = self._bundle.manifest
        graphs = {name: graph for name, graph in self._graphs.items() if name != ROWS}
        if self.variant == "portable":
            if slots is not None and not isinstance(slots, ArraySlots):
                raise BackendError("these are not the slots that this loader made")
            return PortableBackend(
                manifest.model, manifest.tables, graphs, slots, self._threads, self._providers
            )
        if slots is not None and not isinstance(slots, DeviceSlots):
            raise BackendError("these are not the slots that this loader made")
        return DeviceBackend(
            manifest.model,
            graphs,
            slots,
            self._threads,
            self._providers,
            self._memory,
            self.variant,
        )

    @cached_property
    def _graphs(self) -> dict[str, GraphSource]:
        return variant_graphs(self._bundle, self.variant)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OutOfMemoryError:
            raise
        except BackendError as error:
            raise NotRunnableError(str(error)) from error


def device_loaders(
    bundle: Bundle,
    threads: int,
    providers: Sequence[Provider],
    device_memory: int | str | None,
) -> list[DeviceLoader]:
    """One for each variant that the model has, in the order in which they are worth a try.

    Raises BackendError for a model without such graphs.
    """
    limit = None if device_memory is None else parse_size(device_memory)
    order = ON_CPU if providers[0].on_cpu else ACCELERATED
    manifest = bundle.manifest
    described = manifest.model, manifest.tables, format_of(bundle)
    reasons = {name: obstacle(name, *described) for name in order}
    present = [name for name in order if not reasons[name]]
    if not present:
        why = "; ".join(dict.fromkeys(reasons.values()))
        raise BackendError(
            f"{bundle.path}: this model has no graphs for {providers[0].name}: {why}; run it on the CPU"
        )
    return [DeviceLoader(bundle, threads, providers, name, limit) for name in present]


def first_that_runs(
    bundle: Bundle, loaders: Sequence[DeviceLoader], load: Callable[[DeviceLoader], T]
) -> T:
    """What `load` returns for the first loader that it does not raise NotRunnableError for."""
    reasons = []
    for loader in loaders:
        try:
            return load(loader)
        except NotRunnableError as error:
            # Its advice is for one graph; ours below is for all of them.
            reason = str(error).replace(f"{bundle.path}{os.sep}", "").rsplit("; ", 1)[0]
            reasons.append(f"{loader.variant}: {reason}")
    raise BackendError(
        f"{bundle.path}: {loaders[0].provider.name} runs none of its graphs ({'; '.join(reasons)}); "
        f"let the CPU take what it lacks (providers {loaders[0].provider.name}, cpu), or run it on the "
        "CPU alone"
    )

"""Loaders for accelerators: the first variant of the graphs that the provider can run is taken.

Each is opened so that no operator falls back to the CPU, and computes some tokens. If all fail, the
error says why. Kernels for many tokens must agree in their logits with kernels for few.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, DeviceLostError, OutOfMemoryError
from stem_edge.graph.device import variants
from stem_edge.graph.device.rows import DeviceRows
from stem_edge.graph.device.variants import obstacle
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import ROWS, Variant
from stem_edge.numerics.quantize import F32, I32
from stem_edge.runtime.backends.engine import NotRunnableError
from stem_edge.runtime.backends.interface import Backend, NotFiniteError
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.onnxruntime.device.backend import DeviceBackend
from stem_edge.runtime.backends.onnxruntime.device.needs import (
    device_needs,
    device_weights_nbytes,
    portable_needs,
)
from stem_edge.runtime.backends.onnxruntime.device.places import place_of
from stem_edge.runtime.backends.onnxruntime.device.portable import PortableBackend
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of, sources
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, open_session
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.rows.prefetch import ANY_NUMBER
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.nvidia import free_on_nvidia
from stem_edge.tables.rows import RecordLayout


def variant_graphs(bundle: Bundle, variant: Variant) -> dict[str, GraphSource]:
    """Return the graphs of a variant for accelerators by name; the model must have the variant."""
    manifest = bundle.manifest
    graphs = variants.graphs(variant, manifest.model, manifest.tables, format_of(bundle))
    return sources(bundle, graphs)


# By preference: the fastest, the exact one, and the one that needs the fewest operators.
ACCELERATED: tuple[Variant, ...] = ("fp16", "fp32", "portable")
ON_CPU: tuple[Variant, ...] = ("fp32",)  # float16 gains nothing: kernels there compute in float32

# WebGPU's attention for prompts is silently wrong from 32 tokens in a step on, on devices with
# small subgroups. So the same tokens are computed in long steps and in short ones.
MANY_TOKENS, FEW_TOKENS = 64, 16
# Most difference of logits of a position, relative to their size. With realistic rows and six
# layers, right ones in float16 differed by up to 0.003, wrong ones by 0.026 or more, and by 0.011
# where attention hardly tells keys apart.
MOST_APART = 0.006


class WrongStepsWarning(RuntimeWarning):
    """A provider computes many tokens at once wrongly, so prompts take more steps."""


class DeviceLoader:
    """Loads a variant of the graphs on a provider; see EngineLoader."""

    fills_while_opening = False  # because both would use the provider's queue at once
    step_costs = None

    def __init__(
        self,
        bundle: Bundle,
        options: LoadOptions,
        providers: Sequence[Provider],
        variant: Variant,
    ) -> None:
        self._bundle, self._threads, self._providers = bundle, options.cpus, tuple(providers)
        self._sequences = options.sequences
        self.variant, self.name = variant, f"{providers[0].name} {variant}"
        self.kv: KvType = "fp16" if variant == "fp16" else "fp32"
        self.provider = providers[0]  # the others only take operators that it lacks
        self._limit, self._memory = (
            options.device_nbytes,
            DeviceMemory(self.provider, place_of(self.provider)),
        )
        self.step_tokens = ANY_NUMBER
        self._context = bundle.manifest.model.max_context

    def prepare(self) -> None:
        """Do nothing, because providers pack weights in their own memory."""

    def needs(self, context: int) -> Needs:
        footprint, limit = footprint_of(self._bundle.manifest, "onnxruntime"), self._limit
        self._context = context
        if self.variant == "portable":
            return portable_needs(footprint, context, self.provider.name)
        if limit is not None:
            # Less the weights, because onnxruntime allocates those itself.
            self._memory.limit = limit - device_weights_nbytes(footprint)
        elif self.provider.name == "cuda":
            limit = self._free
        return device_needs(
            footprint,
            context,
            self.provider.name,
            self.variant,
            limit=limit,
            asked=self._limit is not None,
            shared=self._memory.kind == "host",
        )

    @cached_property
    def _free(self) -> int | None:
        """Free bytes of an NVIDIA GPU, asked once because plans are made for several contexts."""
        return free_on_nvidia(self.provider.options.get("device_id", "0"))

    def make_slots(self, layout: RecordLayout, count: int) -> Slots:
        if self.variant == "portable":
            return ArraySlots(layout, count)
        graph = self._graphs[ROWS]
        with self._refusing():
            session = open_session(graph, self._threads, self._providers)
            return DeviceSlots(DeviceRows(layout, self.variant), count, self._memory, session)

    def open(self, slots: Slots | None) -> DeviceBackend | PortableBackend:
        with self._refusing():
            backend = self._opened(slots)
            try:
                self.step_tokens = self._trusted_tokens(backend, slots)
                if self._sequences > 2 and isinstance(backend, DeviceBackend):
                    backend.batches = agreeing_batches(backend, slots)  # otherwise they take turns
            except BaseException:
                backend.close()
                raise
        if self.step_tokens < ANY_NUMBER:
            warnings.warn(
                f"{self.provider.name} computes many tokens in one step wrongly here: prompts are "
                f"processed {FEW_TOKENS} tokens at a time, which takes longer",
                WrongStepsWarning,
                stacklevel=2,
            )
        return backend

    def _opened(self, slots: Slots | None) -> DeviceBackend | PortableBackend:
        given = self._bundle.manifest.model, self._graphs, slots, self._threads, self._providers
        if self.variant == "portable":
            return PortableBackend(*given)
        return DeviceBackend(*given, self._memory, self.variant)

    def _trusted_tokens(self, backend: Backend, slots: Slots | None) -> int:
        try:
            return agreeing_tokens(backend, slots, self._context)
        except NotFiniteError:
            if self.variant == "fp16":  # may have overflowed at 65504, which fp32 avoids
                raise
            return ANY_NUMBER  # damaged weights, which every step in use reports better

    @cached_property
    def _graphs(self) -> dict[str, GraphSource]:
        return variant_graphs(self._bundle, self.variant)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn errors other than lack of memory into NotRunnableError, to try the next variant."""
        try:
            yield
        except OutOfMemoryError:
            raise
        except BackendError as error:
            raise NotRunnableError(str(error)) from error


def device_loaders(
    bundle: Bundle, options: LoadOptions, providers: Sequence[Provider]
) -> list[DeviceLoader]:
    """Return a loader for each variant that the model has, the preferred one first.

    Raises BackendError for a model without such graphs.
    """
    order = ON_CPU if providers[0].on_cpu else ACCELERATED
    manifest = bundle.manifest
    described = manifest.model, manifest.tables, format_of(bundle)
    reasons = {name: obstacle(name, *described) for name in order}
    present = [name for name in order if not reasons[name]]
    if not present:
        why = "; ".join(dict.fromkeys(reasons.values()))
        raise BackendError(
            f"{bundle.path}: this model has no graphs for {providers[0].name}: {why}; run it on "
            "the CPU"
        )
    return [DeviceLoader(bundle, options, providers, name) for name in present]


def agreeing_tokens(backend: Backend, slots: Slots | None, context_length: int) -> int:
    """Return the most tokens in a step: ANY_NUMBER, unless many give other logits than few.

    Overwrites slots with placeholder rows. Raises BackendError, because what a device lacks may
    show only when a step runs; NotFiniteError if even few tokens give logits that are not finite.
    """
    # A multiple of short steps, so that both runs end with logits of the same positions.
    tokens = min(MANY_TOKENS, context_length - context_length % FEW_TOKENS) or context_length
    taken = placeholder_rows(slots, tokens)
    few = _last_logits(backend, taken, min(FEW_TOKENS, tokens))
    if tokens <= FEW_TOKENS:
        return ANY_NUMBER
    try:
        many = _last_logits(backend, taken, tokens)
    except NotFiniteError:
        return FEW_TOKENS
    return ANY_NUMBER if _agree(many, few) else FEW_TOKENS


def agreeing_batches(backend: Backend, slots: Slots | None) -> bool:
    """Tell whether a step of sequences of different lengths runs, and gives the logits of each alone.

    Overwrites slots with placeholder rows. Raises OutOfMemoryError, DeviceLostError.
    """
    try:
        return _agree(*_last_logits_of_several(backend, slots))
    except (OutOfMemoryError, DeviceLostError):
        raise
    except BackendError:
        return False


def _last_logits_of_several(backend: Backend, slots: Slots | None) -> list[F32]:
    """Return logits [n, V] of n sequences, together and one after the other."""
    lengths = np.array([FEW_TOKENS, 3, 1])
    taken, length = placeholder_rows(slots, FEW_TOKENS + 1), FEW_TOKENS + 1
    batches = backend.open_batch(len(lengths), length), PlainBatch()
    for batch, tokens in itertools.product(batches, lengths.tolist()):
        context = backend.open_context(length)
        context.begin(np.arange(tokens), 0)
        context.finish(taken[:tokens], 1)
        batch.join(context, tokens)
    found = []
    for batch in batches:
        batch.begin(0, lengths, lengths)
        found.append(batch.finish(taken[lengths]).copy())
    return found


def _agree(found: F32, expected: F32) -> bool:
    apart = np.square(found - expected).mean(axis=1) / np.square(expected).mean(axis=1)
    return bool(apart.max() <= MOST_APART**2)


def _last_logits(backend: Backend, slots: I32, step: int) -> F32:
    """Return logits [n, V] of the last step, for a token in each slot, `step` tokens at a time."""
    context = backend.open_context(len(slots))
    ids = np.arange(len(slots), dtype=np.int64)
    for start in range(0, len(ids), step):
        piece = slice(start, start + step)
        context.begin(ids[piece], start)
        logits = context.finish(slots[piece], min(FEW_TOKENS, len(ids[piece])))
    return logits.copy()  # because the next context overwrites them

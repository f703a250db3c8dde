"""Loading a bundle on onnxruntime: its graphs as they are, or prepared for this processor."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.footprint import footprint_of
from stem_edge.prefill_check import prefill_refusal
from stem_edge.rows import RecordLayout
from stem_edge.runtime import prepared as preparing
from stem_edge.runtime.backend_ort import OrtBackend
from stem_edge.runtime.engines import AUTO, EngineLoader, check_absent
from stem_edge.runtime.needs_ort import cpu_needs
from stem_edge.runtime.options import LoadOptions, Providers
from stem_edge.runtime.plan import Needs
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.providers import CPU, Provider, resolve
from stem_edge.runtime.slots import ArraySlots, Slots
from stem_edge.runtime.user_cache import Prepared
from stem_edge.verdicts import Records, Verdict


def loaders(bundle: Bundle, options: LoadOptions) -> Sequence[EngineLoader]:
    """The one for the CPU, or one for each variant of the graphs that an accelerator may run.

    Raises InputError, BackendError.
    """
    check_absent("onnxruntime", {"repack": options.repack})
    providers = resolve(options.providers, options.provider_libraries)
    if is_plain(options.providers, providers, options.device_memory):
        return [OrtLoader(bundle, options)]
    from stem_edge.runtime.loading_device import device_loaders

    if options.prefill_graph:
        raise InputError("prefill_graph is of the CPU; leave it out on an accelerator")
    return device_loaders(bundle, options, providers)


def is_plain(
    wanted: Providers, resolved: Sequence[Provider], device_memory: int | str | None
) -> bool:
    """Whether the backbone runs on the CPU as it always does, and no part of it plays a device.

    `device_memory` with "auto" does not emulate a device when none is found.
    """
    asked = device_memory is not None and wanted not in (AUTO, [AUTO], (AUTO,))
    return resolved[0].on_cpu and not asked


class OrtLoader:
    """See stem_edge.runtime.engines.EngineLoader: on the CPU."""

    name = "cpu"
    fills_while_opening = True
    step_tokens = ANY_NUMBER

    def __init__(self, bundle: Bundle, options: LoadOptions) -> None:
        self._bundle, self._options = bundle, options
        self._prepared: tuple[Path, Prepared] | None = None
        self._is_prepared = options.prepare
        self._verdict: Verdict | None = None

    def prepare(self, verdict: Verdict | None) -> None:
        """Rearrange a large backbone for this processor, unless that was done."""
        options, self._verdict = self._options, verdict
        if options.prepare:
            self._prepared = preparing.find_or_make(
                self._bundle, options.cache_dir, options.cpus, options.progress
            )
        self._is_prepared = self._prepared is not None

    def needs(self, context: int) -> Needs:
        """See EngineLoader.needs."""
        prompts, footprint = self._prompts(), footprint_of(self._bundle.manifest, "onnxruntime")
        prepared = self._is_prepared and (
            self._prepared is not None
            or preparing.is_worth_it(self._bundle, self._options.cache_dir)
        )
        needs = cpu_needs(
            footprint, context, self._options.cpus, prepared=prepared, prefill=prompts.prefill
        )
        saving = f", or keep the weights in a file: stem-edge prepare {self._bundle.path}"
        return replace(needs, prefill_refused=prompts.refused, saving="" if prepared else saving)

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        """See EngineLoader.make_slots."""
        return ArraySlots(layout, count)

    def open(self, slots: Slots | None) -> OrtBackend:
        """See EngineLoader.open."""
        if slots is not None and not isinstance(slots, ArraySlots):
            raise BackendError("onnxruntime reads its own kind of slots; make them with make_slots")
        graphs = preparing.graph_sources(
            self._bundle, self._prepared, prefill=self._prompts().prefill
        )
        config = self._bundle.manifest.model
        return OrtBackend(config, graphs, slots, self._options.cpus, [CPU])

    def _prompts(self) -> Prompts:
        bundle, options, found = self._bundle, self._options, self._prepared
        if found is None and self._is_prepared:
            found = preparing.find(bundle, options.cache_dir)
        wanted = options.prefill_graph
        refused = prefill_refused(bundle, wanted, options.cache_dir, self._verdict)
        return choose_prompts(bundle, wanted, refused, found)


def prefill_refused(
    bundle: Bundle,
    wanted: bool | None,
    cache_dir: str | Path | None,
    verdict: Verdict | None = None,
) -> str:
    """Why the prefill graph, which nobody asked for by name, is not exact here; empty if it is.

    verdict: of a trial; without it, that of an earlier one, if there was one.
    """
    if wanted is not None or not bundle.manifest.has_prefill:
        return ""
    if verdict is None:
        with contextlib.suppress(InputError):  # no folder that could know
            verdict = Records(bundle, "onnxruntime", cache_dir).verdict()
    return prefill_refusal(bundle.manifest, verdict.prefill_from_decode if verdict else None)


class Prompts(NamedTuple):
    """What prompts go through."""

    prefill: bool  # the prefill graph
    refused: str = ""  # why not that one, if only because it is not exact here


def choose_prompts(
    bundle: Bundle, wanted: bool | None, refused: str, prepared: tuple[Path, Prepared] | None
) -> Prompts:
    """The prefill graph if asked for; unasked, if it is exact here, and not known to be slower."""
    if not bundle.manifest.has_prefill or wanted is False:
        return Prompts(prefill=False)
    if wanted is None and prepared is not None and prepared[1].prefill is False:
        return Prompts(prefill=False)
    return Prompts(prefill=not refused, refused=refused)

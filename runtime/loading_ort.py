"""Loading a bundle on onnxruntime: its graphs as they are, or prepared for this processor."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.prefill_check import prefill_refusal
from stem_edge.rows import RecordLayout
from stem_edge.runtime import prepared as preparing
from stem_edge.runtime.backend_ort import OrtBackend
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.providers import CPU
from stem_edge.runtime.slots import ArraySlots, Slots
from stem_edge.runtime.user_cache import Prepared
from stem_edge.verdicts import Records, Verdict


class OrtLoader:
    """See stem_edge.runtime.engines.EngineLoader: on the CPU. Arguments as of stem_edge.load."""

    fills_while_opening = True
    step_tokens = ANY_NUMBER

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        *,
        prefill_graph: bool | None,
        verdict: Verdict | None,
        prepare: bool,
        cache_dir: str | Path | None,
        progress: bool | None,
    ) -> None:
        self._bundle, self._threads = bundle, threads
        self._prepared = None
        if prepare:
            self._prepared = preparing.find_or_make(bundle, cache_dir, threads, progress)
        refused = prefill_refused(bundle, prefill_graph, cache_dir, verdict)
        self._prompts = choose_prompts(bundle, prefill_graph, refused, self._prepared)

    def describe(self, loading: Loading) -> Loading:
        """See EngineLoader.describe."""
        return dataclasses.replace(
            loading,
            prepared=self._prepared is not None,
            prefill=self._prompts.prefill,
            prefill_refused=self._prompts.refused,
        )

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        """See EngineLoader.make_slots."""
        return ArraySlots(layout, count)

    def open(self, slots: Slots | None) -> OrtBackend:
        """See EngineLoader.open."""
        if slots is not None and not isinstance(slots, ArraySlots):
            raise BackendError("onnxruntime reads its own kind of slots; make them with make_slots")
        graphs = preparing.graph_sources(
            self._bundle, self._prepared, prefill=self._prompts.prefill
        )
        config = self._bundle.manifest.model
        return OrtBackend(config, graphs, slots, self._threads, [CPU])


def planned(
    bundle: Bundle,
    loading: Loading,
    *,
    prefill_graph: bool | None,
    prepare: bool,
    cache_dir: str | Path | None,
) -> Loading:
    """What OrtLoader.describe would say, without preparing or trying anything."""
    found = preparing.find(bundle, cache_dir) if prepare else None
    refused = prefill_refused(bundle, prefill_graph, cache_dir)
    prompts = choose_prompts(bundle, prefill_graph, refused, found)
    return dataclasses.replace(
        loading,
        prepared=prepare and preparing.is_worth_it(bundle, cache_dir),
        prefill=prompts.prefill,
        prefill_refused=prompts.refused,
    )


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

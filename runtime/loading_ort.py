"""Loading a bundle on onnxruntime: its graphs as they are, or prepared for this processor.

Everything in the graphs is checked before onnxruntime sees any.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError
from stem_edge.onnx_check import check_graphs
from stem_edge.rows import RecordLayout
from stem_edge.runtime import prepared as preparing
from stem_edge.runtime.backend_ort import OrtBackend
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.providers import CPU
from stem_edge.runtime.slots import ArraySlots, Slots
from stem_edge.runtime.user_cache import Prepared


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
        prepare: bool,
        cache_dir: str | Path | None,
        progress: bool | None,
    ) -> None:
        self._bundle, self._threads = bundle, threads
        check_graphs(bundle, [None])
        self._prepared = None
        if prepare:
            self._prepared = preparing.find_or_make(bundle, cache_dir, threads, progress)
        self._prefill = takes_prefill(bundle, prefill_graph, self._prepared)

    def describe(self, loading: Loading) -> Loading:
        """See EngineLoader.describe."""
        return dataclasses.replace(
            loading, prepared=self._prepared is not None, prefill=self._prefill
        )

    def make_slots(self, layout: RecordLayout, count: int) -> ArraySlots:
        """See EngineLoader.make_slots."""
        return ArraySlots(layout, count)

    def open(self, slots: Slots | None) -> OrtBackend:
        """See EngineLoader.open."""
        if slots is not None and not isinstance(slots, ArraySlots):
            raise BackendError("onnxruntime reads its own kind of slots; make them with make_slots")
        files = preparing.graph_files(self._bundle, self._prepared, prefill=self._prefill)
        config = self._bundle.manifest.model
        return OrtBackend(config, files, slots, self._threads, [CPU])


def planned(
    bundle: Bundle,
    loading: Loading,
    *,
    prefill_graph: bool | None,
    prepare: bool,
    cache_dir: str | Path | None,
) -> Loading:
    """What OrtLoader.describe would say, without preparing anything."""
    found = preparing.find(bundle, cache_dir) if prepare else None
    large = preparing.matrices_nbytes(bundle) >= preparing.LEAST_NBYTES
    return dataclasses.replace(
        loading,
        prepared=prepare and large,
        prefill=takes_prefill(bundle, prefill_graph, found),
    )


def takes_prefill(
    bundle: Bundle, wanted: bool | None, prepared: tuple[Path, Prepared] | None
) -> bool:
    """Whether the int8 graph takes prompts. Default: if it was the faster one when prepared."""
    if wanted is None:
        wanted = True if prepared is None else prepared[1].prefill is not False
    return wanted and bundle.manifest.has_prefill

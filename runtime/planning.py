"""Plans memory for a load without loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from stem_edge.runtime.backends.engines import choose_engine
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.load_plan import loader_of_kv, open_text

if TYPE_CHECKING:
    from stem_edge.runtime.backends.keywords import MoreKeywords
else:
    MoreKeywords = dict  # for those who ask for the types of memory_plan


def memory_plan(
    path: str | Path,
    memory: int | str | None = None,
    **more: Unpack[MoreKeywords],
) -> MemoryPlan:
    """Plan memory as `load` would with these keywords, without loading anything.

    It assumes that the first load's work is done: packing weights for this processor into cached files.
    """
    options = LoadOptions.public({"memory": memory, **more})
    bundle = options.open(path)
    chosen = choose_engine(bundle, options.engine)
    # Read as `load` does, because the memory that this process keeps from it counts.
    later = open_text(bundle, options).nbytes_to_come
    return loader_of_kv(bundle, chosen, options, later)[1]

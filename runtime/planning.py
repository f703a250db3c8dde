"""Plans memory for a load without loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.load_plan import plan_alone

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
    return plan_alone(options.open(path), options)[1]

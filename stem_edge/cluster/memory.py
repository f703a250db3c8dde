"""Memory that a model takes on each machine of a cluster."""

from __future__ import annotations

from pathlib import Path

from stem_edge.runtime import memory_plan
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.system.memory import own_memory

PROCESS_NBYTES = 256 << 20  # of a process of Ray that has imported what runs models, at most


def planned_nbytes(bundle: str | Path, keywords: LoadKeywords) -> int:
    """Return the memory that a process takes which loads a bundle with these keywords.

    Raises what stem_edge.load raises before it reads weights.
    """
    return memory_plan(bundle, **keywords).total - own_memory() + PROCESS_NBYTES


def on_machine(keywords: LoadKeywords, cpus: int, nbytes: int) -> LoadKeywords:
    """Return keywords of stem_edge.load for a machine of a cluster.

    nbytes: memory of the process; otherwise each would plan by what is free there.
    """
    threads, memory = min(keywords.get("threads") or cpus, cpus), keywords.get("memory")
    memory = nbytes if memory is None else memory
    return {**keywords, "threads": threads, "memory": memory, "progress": False}

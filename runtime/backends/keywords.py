"""Types of the keywords of stem_edge.load, for functions that accept them or pass them on."""

from __future__ import annotations

from typing import Literal, TypedDict

from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.options import Folder, Speculate


class MoreKeywords(TypedDict, total=False):
    """Keywords of stem_edge.load that cannot be given by position."""

    provider: str
    device_memory: int | str | None
    threads: int | None
    context_length: int | None
    sequences: int
    engine: str
    kv: KvChoice
    speculate: Speculate
    exact: bool
    slots: int | None
    resident: bool
    tables: str | None
    cache_dir: Folder
    prompt_cache: Literal[True] | Folder
    progress: bool | None


class LoadKeywords(MoreKeywords, total=False):
    """All keywords of stem_edge.load, for functions that pass them on."""

    memory: int | str | None

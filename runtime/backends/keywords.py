"""Types of the keyword arguments of stem_edge.load, for functions that pass them on."""

from __future__ import annotations

from typing import Literal, TypedDict

from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.options import Folder, Speculate


class MoreKeywords(TypedDict, total=False):
    """Keyword-only arguments of stem_edge.load."""

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
    """All arguments of stem_edge.load except the bundle's path."""

    memory: int | str | None

"""Types of the keywords of stem_edge.load, for functions that take or pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.options import Folder, Providers, Speculate
from stem_edge.runtime.rows.shards import FlashName, ReadMode


class _DeviceLimits(TypedDict, total=False):
    provider_libraries: Mapping[str, str | Path] | None
    device_memory: int | str | None
    host_slots: int | None


class DeviceKeywords(_DeviceLimits, total=False):
    """Keywords of stem_edge.load that choose what the backbone runs on."""

    providers: Providers


class MoreKeywords(_DeviceLimits, total=False):
    """Keywords of stem_edge.load that cannot be given by position."""

    engine: str
    slots: int | None
    sequences: int
    resident: bool
    overlap: bool
    kv: KvChoice
    prefill_graph: bool | None
    prepare: bool
    repack: bool
    warm_start: bool
    cache_dir: Folder
    trial: bool
    tables_later: bool
    emulate_flash: FlashName | None
    tables: str | None
    disk_tier: int | str | None
    keep_prefixes: bool
    prompt_cache: Literal[True] | Folder
    speculate: Speculate
    draft: str | Path | None
    exact: bool
    progress: bool | None


class OtherKeywords(MoreKeywords, total=False):
    """Keywords of stem_edge.load except memory and context_length."""

    threads: int | None
    providers: Providers
    reads: ReadMode


class LoadKeywords(OtherKeywords, total=False):
    """Keywords of stem_edge.load, complete, for functions that pass them on."""

    memory: int | str | None
    context_length: int | None

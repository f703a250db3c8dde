"""Arguments of stem_edge.load that choose what the backbone runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from stem_edge.runtime.engines import Providers


class DeviceOptions(TypedDict, total=False):
    """See stem_edge.load; what is left out has its default there."""

    providers: Providers
    provider_libraries: Mapping[str, str | Path] | None
    device_memory: int | str | None
    host_slots: int | None

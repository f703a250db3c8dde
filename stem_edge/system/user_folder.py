"""The user's cache folder, and what in it depends on the processor."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from stem_edge.errors import InputError

KEY_CHARS = 32  # of the digests that name what is in the folder


def cache_folder(given: str | Path | None) -> Path:
    """The folder: the given one, or where this system keeps caches of applications."""
    if given is not None:
        return Path(given)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("stem-edge", appauthor=False)
    except RuntimeError as error:  # of a user without a name in a container, for example
        raise InputError(
            f"there is no folder for caches ({error}); set HOME, or give cache_dir (--cache-dir)"
        ) from error


def cpu_digest() -> str:
    """A digest of what kernels are chosen by: the processor's name and features."""
    told = cpu_info()
    words = [" ".join(sorted(told.get(name, []))) for name in ("model name", "flags", "Features")]
    described = "\n".join([platform.machine(), platform.processor(), *words])
    return hashlib.sha256(described.encode()).hexdigest()[:KEY_CHARS]


def cpu_announces(feature: str) -> bool:
    """Whether the processor says that it has it (`amx_tile`); False where the system is silent."""
    told = cpu_info()
    return feature in [*told.get("flags", []), *told.get("Features", [])]


def cpu_info() -> dict[str, list[str]]:
    """What Linux tells of the first processor: name -> words."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.split() for name, _, value in pairs}

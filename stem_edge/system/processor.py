"""The processor: what Linux tells of it, and a digest by which files made for it are named."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def cpu_digest() -> str:
    """Digest of the processor's name and features, by which kernels are chosen."""
    fields = cpu_info()
    words = [" ".join(sorted(fields.get(name, []))) for name in ("model name", "flags", "Features")]
    # Its name by the platform, for which Python runs a program, is needed only where nothing else is known.
    named = "" if any(words) else platform.processor()
    described = "\n".join([platform.machine(), named, *words])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def cpu_info() -> dict[str, list[str]]:
    """Fields of /proc/cpuinfo for the first processor, name -> words; none without the file."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.split() for name, _, value in pairs}

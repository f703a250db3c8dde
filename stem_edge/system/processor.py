"""The processor's features, and their hash for names of files that fit only this processor."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def cpu_digest() -> str:
    """Return a hash of the processor's name and features, which determine what kernels run."""
    fields = cpu_info()
    words = [" ".join(sorted(fields.get(name, []))) for name in ("model name", "flags", "Features")]
    # platform.processor() may start a program, so it is called only if nothing else is known.
    named = "" if any(words) else platform.processor()
    described = "\n".join([platform.machine(), named, *words])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def cpu_info() -> dict[str, list[str]]:
    """Return the fields of /proc/cpuinfo for the first processor: name -> words."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.split() for name, _, value in pairs}

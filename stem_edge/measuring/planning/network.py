"""A network between this machine and the tables, and the disk tier before it, as stated for a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from stem_edge.errors import InputError
from stem_edge.runtime.rows.disk_tier import USUAL_NBYTES, parse_tier
from stem_edge.units import format_size, parse_size

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXPECTED = "expected latency and bytes a second, like 20ms,100MB"


class Network(NamedTuple):
    """Cost of a record from elsewhere, and how many bytes of records the disk tier keeps."""

    latency: float  # seconds from a request to its first byte
    bandwidth: float  # bytes a second
    tier_nbytes: int

    def wait(self, nbytes: int) -> float:
        """Seconds for one range of `nbytes` bytes."""
        return self.latency + nbytes / self.bandwidth

    def tier_share(self, hits: Callable[[int], float], slots: int, record_nbytes: int) -> float:
        """Return the share of misses of a cache with `slots` slots that a full tier has.

        hits: slots -> hit rate. The tier then holds the most used records after those in the slots.
        """
        hit_rate = hits(slots)
        if hit_rate >= 1:
            return 0.0
        return (hits(slots + self.tier_nbytes // record_nbytes) - hit_rate) / (1 - hit_rate)

    def __str__(self) -> str:
        return f"{self.latency * 1e3:.3g} ms and {format_size(self.bandwidth)}/s a request (stated)"


def parse_network(text: str | None, disk_tier: int | str | None) -> Network | None:
    """Parse a network and its disk tier; None without a network. Raises InputError."""
    if text is None:
        if disk_tier is not None:
            raise InputError(
                "network is missing, and disk_tier belongs to it; give both, or leave both out"
            )
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*,\s*(.+?)\s*", text)
    if found is None:
        raise InputError(f"network is {text!r}; {EXPECTED}")
    latency, bandwidth = float(found[1]) * SECONDS[found[2]], found[3].removesuffix("/s")
    tier = USUAL_NBYTES if disk_tier is None else parse_tier(disk_tier)
    try:
        return Network(latency, parse_size(bandwidth), tier)
    except InputError as error:
        raise InputError(f"network is {text!r}; {EXPECTED} ({error})") from error

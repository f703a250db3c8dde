"""Many machines: phones that fetch rows over a network, and a cluster that serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scale_machines import GPU, HOST, ON_PHONE, RAID
from scale_shapes import VOCABULARY, Share, read_nbytes, sizes_of
from scale_steps import ROWS_RATE, slots_in, step_of
from scale_tables import Cell, Table
from scale_text import Reads, Text, in_step, no_reads, run_cache

from stem_edge.bundle.footprint import Footprint
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.emulated_flash import FlashProfile
from stem_edge.tables.token_counts import count_tokens

# Latency: the world's median on mobile networks in November 2022, by Ookla. Bandwidth: assumed.
MOBILE = FlashProfile(50e6 / 8, 28e-3, 8)
# 100 Gbit/s for each node; the latency of a store is assumed.
NETWORK = FlashProfile(12.5e9, 300e-6, 128)
KEPT = (0.01, 0.05, 0.1)  # shares of the rows on a phone
ON_PHONES: tuple[tuple[str, Share], ...] = (
    ("1B", "1/3"), ("1B", "full"), ("3B", "1/3"), ("3B", "full"),
)  # fmt: skip


def phones(ids: I64, other: I64, day: int, context: int) -> Table:
    """What a phone fetches that keeps a share of the rows on its flash, day after day.

    ids: what a user reads and writes, `day` tokens each day. other: a text by whose counts the first
    rows are chosen. After that, the rule of the row cache decides which are kept.
    """
    table = Table(
        "model", "layers with rows", "rows kept", "kept, GB", "all tables, GB", "first day: hit rate",
        "first day: MB", "last day: hit rate", "last day: MB", "wait, ms a token", "decode step, ms",
        "a million phones, TB a day",
    )  # fmt: skip
    counts = count_tokens(other, VOCABULARY)
    runs = [(kept, run_cache(in_step(ids, 1), round(kept * VOCABULARY), counts)) for kept in KEPT]
    last = len(ids) // day - 1
    for name, share in ON_PHONES:
        sizes = sizes_of(name, share)
        for kept, reads in runs:
            days = [reads.part(at * day, (at + 1) * day) for at in (0, last)]
            table.add(name, share, f"{kept:.0%}", *_kept(sizes, kept, days, day, context))
    return table


def _kept(
    sizes: Footprint, kept: float, days: list[Reads], day: int, context: int
) -> tuple[Cell, ...]:
    fetched = [reads.read_per_token * day * read_nbytes(sizes) for reads in days]
    away = replace(ON_PHONE, tables=MOBILE)
    step = step_of(away, sizes, context, no_reads(), 0).seconds
    wait = step_of(away, sizes, context, days[-1], 0).rows
    first, last = days
    return (
        kept * sizes.tables_nbytes / 1e9,
        sizes.tables_nbytes / 1e9,
        first.hit_rate,
        fetched[0] / 1e6,
        last.hit_rate,
        fetched[1] / 1e6,
        1e3 * wait,
        1e3 * step,
        1e6 * fetched[1] / 1e12,
    )


@dataclass(frozen=True)
class Placement:
    """Where the tables of a cluster lie, as one of its nodes sees it."""

    name: str
    source: FlashProfile
    cache: int  # bytes of rows on the GPU
    far: bool = False  # whether rows come over the network


PLACEMENTS = (
    Placement("a copy in each host's memory", HOST, 0),
    Placement("a copy in each host's memory", HOST, 8_000_000_000),
    Placement("a copy on 4 NVMe of each node", RAID, 0),
    Placement("a copy on 4 NVMe of each node", RAID, 8_000_000_000),
    Placement("one store for all", NETWORK, 0, far=True),
    Placement("one store for all", NETWORK, 1_000_000_000, far=True),
    Placement("one store for all", NETWORK, 8_000_000_000, far=True),
)


def cluster(
    text: Text, share: Share, nodes: int, sequences: int, context: int, rate: float = ROWS_RATE
) -> Table:
    """What a cluster of nodes with a GPU each reads and sends, by the place of its tables.

    rate: bytes of rows a second that the runtime of a node takes.
    """
    table = Table(
        "model", "tables", "rows on GPU, GB", "tables on a node, GB", "hit rate", "rows, % of time",
        "a node: tok/s", "records/s", "rows, GB/s", "network, Gbit/s", "all nodes: network, GB/s",
    )  # fmt: skip
    for name in ("8B", "70B"):
        sizes = sizes_of(name, share)
        for placement in PLACEMENTS:
            reads = text.reads(sequences, slots_in(sizes, placement.cache))
            there = replace(GPU, tables=placement.source, rows_rate=rate)
            step = step_of(there, sizes, context, reads, placement.cache)
            speed = sequences / step.seconds
            records = speed * reads.read_per_token
            nbytes = records * read_nbytes(sizes)
            sent = nbytes if placement.far else 0.0
            table.add(
                name, placement.name, placement.cache / 1e9,
                0.0 if placement.far else sizes.tables_nbytes / 1e9, reads.hit_rate,
                100 * step.rows / step.seconds, speed, records, nbytes / 1e9, 8 * sent / 1e9,
                nodes * sent / 1e9,
            )  # fmt: skip
    return table

"""Time of a decode step on a machine: weights and keys and values from memory, rows from elsewhere.

The model of time is that of `stem-edge fit` (stem_edge.measuring.planning), for several sequences:
a step reads all weights once, its own keys and values, and each distinct row that the cache lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scale_shapes import SHAPES, Share, read_nbytes, sizes_of
from scale_tables import Cell, Table
from scale_text import F64, Reads, Text

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.kv import KvType
from stem_edge.measuring.memory.device_profiles import DEVICES, Device
from stem_edge.measuring.planning.rates import WEIGHTS_SHARE, derived_rates
from stem_edge.measuring.planning.timing import Rates
from stem_edge.runtime.rows.emulated_flash import PROFILES, FlashProfile

NVME, DRIVES = PROFILES["nvme"], 4
RAID = FlashProfile(DRIVES * NVME.bandwidth, NVME.latency, DRIVES * NVME.depth)
HOST = FlashProfile(50e9, 20e-6, 64)  # PCIe 5.0 x16 has 64 GB/s each way; the rest is assumed
GPU_LAYER_SECONDS = 20e-6  # assumed
# Bytes a second at which one thread of the runtime takes records out of the page cache, checks them and
# puts them into slots, as `scale.py check` measured it. It reads them one after the other.
ROWS_RATE = 2e9


@dataclass(frozen=True)
class Machine:
    """Speeds and sizes of a machine, and where its tables lie."""

    name: str
    memory: int  # bytes for weights, keys and values, and the row cache
    bandwidth: float  # of that memory, bytes a second
    flops: float  # multiplications and additions a second that matrix products reach
    tables: FlashProfile
    cache: int  # bytes of the row cache
    kv: KvType = "fp32"
    gpu: bool = False

    def rates(self, footprint: Footprint) -> Rates:
        """Rates of a decode step: those of `fit --bandwidth`, or a GPU's, which no run has checked."""
        if not self.gpu:
            return derived_rates(self.bandwidth, self.name, footprint)
        rate = WEIGHTS_SHARE * self.bandwidth
        return Rates(rate, rate, rate, GPU_LAYER_SECONDS, "assumed")


PHONE, LAPTOP = DEVICES["phone-12gb"], DEVICES["laptop-16gb"]
# Multiplications and additions a second of one core in steps of 8 and 16 tokens, on average: 102 and
# 105 tok/s on two cores without AMX, in docs/results.md.
CORE_FLOPS = 0.1e12


# Memory of the server: 12 channels of DDR5-4800. Of the GPU: what is published of the H100 SXM, and
# half of its dense bf16 speed.
def on_device(name: str, device: Device, cache: int) -> Machine:
    """Describe a device that `stem-edge fit` knows."""
    flops, tables = device.cpus * CORE_FLOPS, PROFILES[device.flash]
    return Machine(name, device.memory, device.bandwidth, flops, tables, cache)


GPU = Machine(
    "H100, rows in host memory", 80_000_000_000, 3.35e12, 0.5 * 989e12, HOST, 8_000_000_000, "fp16",
    gpu=True,
)  # fmt: skip
ON_PHONE = on_device("phone", PHONE, 256_000_000)
ON_LAPTOP = on_device("laptop", LAPTOP, 1_000_000_000)
SERVER = Machine("server", 256_000_000_000, 12 * 38.4e9, 64 * CORE_FLOPS, RAID, 8_000_000_000)
RUNS: tuple[tuple[Machine, tuple[str, ...], tuple[int, ...]], ...] = (  # models, sequences
    (ON_PHONE, ("1B", "3B"), (1,)),
    (ON_LAPTOP, ("3B", "8B"), (1, 8)),
    (SERVER, ("8B", "70B"), (1, 8, 64)),
    (GPU, ("8B", "70B"), (1, 8, 64, 256)),
    (replace(GPU, name="H100, rows on 4 NVMe", tables=RAID), ("8B", "70B"), (64, 256)),
)
CACHES = (256_000_000, 1_000_000_000, 8_000_000_000)


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of a decode step, and bytes of memory that decoding needs."""

    weights: float
    compute: float
    kv: float
    layers: float  # small operators
    rows: float  # waiting for them
    memory: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: products take what is longer of reading and computing."""
        return max(self.weights, self.compute) + self.kv + self.layers + self.rows

    def limit(self, machine: Machine) -> str:
        """Return what decides the speed, in words."""
        if self.memory > machine.memory:
            return "memory is too small"
        parts = {
            "weights": self.weights if self.weights >= self.compute else 0.0,
            "compute": self.compute,
            "keys and values": self.kv,
            "small operators": self.layers,
            "rows": self.rows,
        }
        return max(parts, key=lambda name: parts[name])


def step_of(machine: Machine, footprint: Footprint, context: int, reads: Reads, cache: int) -> Step:
    """Predict a decode step, with `context` tokens in each sequence.

    cache: bytes of the row cache with which `reads` were simulated.
    """
    footprint = footprint.with_kv(machine.kv)
    rates, model, batch = machine.rates(footprint), footprint.model, reads.batch
    weights = footprint.step_nbytes / rates.weights
    compute = 2 * model.active_parameters * batch / machine.flops
    kv = batch * footprint.kv_read_nbytes(context) / rates.kv
    layers = model.n_layers * rates.layer_seconds
    rows = float(arrival(machine.tables, read_nbytes(footprint), reads).mean())
    memory = footprint.backbone_nbytes + batch * footprint.kv_nbytes(context) + cache
    return Step(weights, compute, kv, layers, rows, memory)


def arrival(flash: FlashProfile, nbytes: int, reads: Reads) -> F64:
    """Return the seconds until the records of each step are in their slots.

    They come as emulated flash delays them. Nothing else happens meanwhile: the step has begun, and
    a prepared backbone computes it in one run.
    """
    rounds = -(-reads.read // flash.depth)
    each = nbytes / flash.bandwidth + nbytes / ROWS_RATE
    return np.asarray(flash.latency * rounds + reads.read * each, np.float64)


def device_allows(flash: FlashProfile, nbytes: int, reads: Reads) -> float:
    """Return the tokens a second that a device could read rows for, with all its queue in use."""
    return 1 / (reads.read_per_token * max(flash.latency / flash.depth, nbytes / flash.bandwidth))


def runtime_allows(nbytes: int, reads: Reads) -> float:
    """Return the tokens a second that the runtime could take rows for, if they were in memory."""
    return ROWS_RATE / (reads.read_per_token * nbytes)


def slots_in(footprint: Footprint, cache: int) -> int:
    """Return how many slots a row cache of so many bytes has."""
    return min(cache // footprint.slot_nbytes, footprint.model.records)


def caches(text: Text, share: Share) -> Table:
    """Bytes that a token reads from the tables, by the size of the row cache in memory."""
    sizes = [f"{nbytes // 10**6:,} MB" for nbytes in CACHES]
    each = (f"{size}: {what}" for size in sizes for what in ("slots", "hit rate", "kB a token"))
    table = Table("model", "no cache, kB a token", *each)
    for name in SHAPES:
        footprint, cells = sizes_of(name, share), list[Cell]()
        for nbytes in CACHES:
            slots = slots_in(footprint, nbytes)
            reads = text.reads(1, slots)
            cells += [slots, reads.hit_rate, reads.read_per_token * read_nbytes(footprint) / 1e3]
        table.add(name, read_nbytes(footprint) / 1e3, *cells)
    return table


def machines(text: Text, share: Share, context: int) -> Table:
    """Time of decode steps on one machine, and what limits them."""
    table = Table(
        "machine", "model", "sequences", "memory, GB", "distinct rows a step",
        "no cache: device allows, tok/s", "runtime allows, tok/s", "no cache: rows, % of time",
        "cache: hit rate", "cache: rows, % of time", "tok/s", "limit",
    )  # fmt: skip
    for machine, models, batches in RUNS:
        for name in models:
            for batch in batches:
                cells = _run(machine, sizes_of(name, share), context, batch, text)
                table.add(machine.name, name, batch, *cells)
    return table


def _run(
    machine: Machine, sizes: Footprint, context: int, batch: int, text: Text
) -> tuple[Cell, ...]:
    every, reads = text.reads(batch, 0), text.reads(batch, slots_in(sizes, machine.cache))
    bare = step_of(machine, sizes, context, every, 0)
    step = step_of(machine, sizes, context, reads, machine.cache)
    return (
        step.memory / 1e9,
        every.distinct_per_step,
        device_allows(machine.tables, read_nbytes(sizes), every),
        runtime_allows(read_nbytes(sizes), every),
        100 * bare.rows / bare.seconds,
        reads.hit_rate,
        100 * step.rows / step.seconds,
        batch / step.seconds,
        step.limit(machine),
    )

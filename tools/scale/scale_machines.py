"""Machines, and what decoding takes on each of them."""

from __future__ import annotations

from dataclasses import replace

from scale_shapes import Share, read_nbytes, sizes_of
from scale_steps import (
    GPU_KV_SHARE,
    GPU_LAYER_SECONDS,
    Machine,
    device_allows,
    runtime_allows,
    slots_in,
    step_of,
)
from scale_tables import Cell, Table
from scale_text import Text

from stem_edge.bundle.footprint import Footprint
from stem_edge.measuring.memory.device_profiles import DEVICES, Device
from stem_edge.runtime.rows.emulated_flash import PROFILES, FlashProfile

NVME, DRIVES = PROFILES["nvme"], 4
RAID = FlashProfile(DRIVES * NVME.bandwidth, NVME.latency, DRIVES * NVME.depth)
HOST = FlashProfile(50e9, 20e-6, 64)  # PCIe 5.0 x16 has 64 GB/s each way; the rest is assumed
PHONE, LAPTOP = DEVICES["phone-12gb"], DEVICES["laptop-16gb"]
# Multiplications and additions a second of one core in steps of 8 and 16 tokens, on average: 102 and
# 105 tok/s on two cores without AMX, in docs/results.md.
CORE_FLOPS = 0.1e12


def on_device(name: str, device: Device, cache: int) -> Machine:
    """Describe a device that `stem-edge fit` knows."""
    flops, tables = device.cpus * CORE_FLOPS, PROFILES[device.flash]
    return Machine(name, device.memory, device.bandwidth, flops, tables, cache)


# Memory of the server: 12 channels of DDR5-4800. Of the GPU: what is published of the H100 SXM, and
# half of its dense bf16 speed.
GPU = Machine(
    "H100, rows in host memory", 80_000_000_000, 3.35e12, 0.5 * 989e12, HOST, 8_000_000_000,
    kv="fp16", kv_share=GPU_KV_SHARE, layer_seconds=GPU_LAYER_SECONDS,
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

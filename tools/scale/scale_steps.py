"""Time of a decode step on a machine: weights and keys and values from memory, rows from elsewhere.

A step reads all weights once, the keys and values of each sequence, and each distinct row that the
cache lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scale_shapes import read_nbytes
from scale_text import F64, Reads

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.kv import KvType
from stem_edge.runtime.rows.emulated_flash import FlashProfile

# Shares of the memory's bandwidth that kernels of a processor reached (docs/results.md); those of a
# GPU are assumed, as is the time of a layer's small operators on both.
WEIGHTS_SHARE, KV_SHARE, LAYER_SECONDS = 0.8, 0.3, 150e-6
GPU_KV_SHARE, GPU_LAYER_SECONDS = 0.8, 20e-6
# Bytes a second at which the runtime takes several records out of the page cache, checks them and
# puts them into slots, one after the other: measured on two cores of an EPYC, with 127 kB each.
ROWS_RATE = 3.5e9


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
    kv_share: float = KV_SHARE  # of the bandwidth, that reading keys and values reaches
    layer_seconds: float = LAYER_SECONDS  # small operators of a layer


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
    model, batch = footprint.model, reads.batch
    weights = footprint.step_nbytes / (WEIGHTS_SHARE * machine.bandwidth)
    compute = 2 * model.active_parameters * batch / machine.flops
    kv = batch * footprint.kv_read_nbytes(context) / (machine.kv_share * machine.bandwidth)
    layers = model.n_layers * machine.layer_seconds
    nbytes = read_nbytes(footprint)
    rows = float(arrival(machine.tables, nbytes, reads).mean())
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

"""What a model takes of a device's own memory, and how many slots of its row cache fit beside it."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.device_rows import Activations, DeviceRows
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.footprint import FLOAT, HALF, Footprint
from stem_edge.graph_io import Variant
from stem_edge.runtime import plan_ort
from stem_edge.units import format_size

WIDTHS: dict[Activations, int] = {"fp32": FLOAT, "fp16": HALF}  # bytes of an activation
# What onnxruntime keeps on a device beside what it was given: buffers of kernels, and pools.
FIXED_NBYTES = 16 << 20


@dataclass(frozen=True)
class OnDevice:
    """What is chosen before memory is planned."""

    provider: str
    variant: Variant
    limit: int | None  # bytes of the device's memory, where anyone knows
    asked: bool  # whether that is what the user allowed, and not what the device has
    shared: bool  # it has no memory of its own: what it takes is this process's


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of each part in the memory of a device, and the numbers they follow from."""

    provider: str
    variant: Variant
    limit: int | None
    shared: bool
    context_length: int
    chunk_tokens: int
    slots: int
    weights: int
    kv_cache: int
    activations: int
    row_cache: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        return [
            ("weights", self.weights),
            (f"KV cache of {self.context_length} tokens", self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
            (f"row cache of {self.slots} slots", self.row_cache),
        ]


def weights_nbytes(footprint: Footprint) -> int:
    """Of either variant: both hold codes and float matrices as they are, and scales are small."""
    return FIXED_NBYTES + footprint.backbone_nbytes


class DevicePlanner:
    """Plans for one bundle on one device, with one of the variants that keep everything there."""

    def __init__(self, footprint: Footprint, device: OnDevice, context_length: int) -> None:
        if device.variant == "portable":
            raise ValueError("the portable variant keeps nothing on a device")
        activations: Activations = device.variant
        self._footprint, self._device, self._context = footprint, device, context_length
        self._width = WIDTHS[activations]
        tables = footprint.tables
        self.rows = DeviceRows(tables, activations) if tables is not None else None
        self._records = tables.records if tables is not None else 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot on the device."""
        return self.rows.slot_nbytes if self.rows is not None else 0

    def plan(self, chunk: int, slots: int) -> DevicePlan:
        """With so many slots, or one for every record."""
        footprint, width = self._footprint, self._width
        slots = min(slots, self._records)
        chunk = min(chunk, slots) if slots < self._records else chunk
        floats = plan_ort.activations_nbytes(footprint, chunk, self._context, 1, prefill=False)
        return DevicePlan(
            provider=self._device.provider,
            variant=self._device.variant,
            limit=self._device.limit,
            shared=self._device.shared,
            context_length=self._context,
            chunk_tokens=chunk,
            slots=slots,
            weights=weights_nbytes(footprint),
            kv_cache=footprint.kv_nbytes(self._context) * width // FLOAT,
            activations=floats * width // FLOAT + self._staged_nbytes(chunk),
            row_cache=slots * self.slot_nbytes,
        )

    def _staged_nbytes(self, chunk: int) -> int:
        """Rows on their way into slots: as they came, and in pieces."""
        return 2 * chunk * self.slot_nbytes

    def least(self, largest_chunk: int, smallest_chunk: int, slots: int | None) -> DevicePlan:
        """The plan with the largest chunk that fits, and the fewest slots or those asked for.

        Raises MemoryPlanError if nothing fits, InputError for slots that cannot be.
        """
        if slots is not None and not 1 <= slots <= max(1, self._records):
            raise InputError(f"slots is {slots}; expected 1 to {self._records}")
        limit, chunk = self._device.limit, largest_chunk
        while True:
            found = self.plan(chunk, chunk if slots is None else slots)
            if limit is None or found.total <= limit:
                return found
            if chunk <= smallest_chunk:
                raise MemoryPlanError(_refusal(found, limit))
            chunk //= 2

    def filled(self, least: DevicePlan, cache_nbytes: int | None) -> DevicePlan:
        """The same with as many slots as fit, or, without a limit, as `cache_nbytes` hold."""
        if not self.slot_nbytes:
            return least
        spare = 0
        if self._device.limit is not None:
            spare = self._device.limit - least.total
        if cache_nbytes is not None:
            capped = cache_nbytes - least.row_cache
            spare = capped if self._device.limit is None else min(spare, capped)
        return self.plan(least.chunk_tokens, least.slots + max(0, spare) // self.slot_nbytes)


def _refusal(least: DevicePlan, limit: int) -> str:
    parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in least.parts())
    return (
        f"device memory of {format_size(limit)} is too small for this model on {least.provider}: at "
        f"least {format_size(least.total, up=True)} are needed ({parts}); allow more, shorten the "
        "context, or run it on the CPU"
    )

"""Memory in which ggml rearranges weights for its faster kernels, if its build has any."""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.ggml import Ggml
from stem_edge.runtime.ggml_graph import Tensor, freed_with
from stem_edge.runtime.machine import advise_huge_pages

REPACK = "CPU_REPACK"  # ggml's name of that memory


def can_repack(ggml: Ggml) -> bool:
    """Whether this build has such kernels, and they computed the right products when tried."""
    return ggml.repack and ggml.extra_buffer_type(REPACK) is not None


class RepackedMemory:
    """Places for some matrices. Raises BackendError."""

    def __init__(self, ggml: Ggml, tensors: Sequence[Tensor]) -> None:
        kind = ggml.extra_buffer_type(REPACK) if can_repack(ggml) else None
        if kind is None:
            raise BackendError(
                f"{ggml.path}: this build of ggml does not rearrange weights; leave repack out"
            )
        self._ggml, step = ggml, int(ggml.backend_buft_get_alignment(kind))
        sizes = [_up(ggml.backend_buft_get_alloc_size(kind, tensor), step) for tensor in tensors]
        total = sum(sizes) + step
        buffer = ggml.backend_buft_alloc_buffer(kind, total)
        if not buffer:
            raise OutOfMemoryError(
                f"ggml cannot take {total:,} bytes for rearranged weights; leave repack out"
            )
        freed_with(self, ggml.backend_buffer_free, buffer)
        base = ggml.backend_buffer_get_base(buffer)
        # 7 % of a decode step at the 1B shape: pages of 4 KiB end what a processor reads ahead.
        advise_huge_pages(base, total)
        address = _up(base, step)
        for tensor, size in zip(tensors, sizes, strict=True):
            ggml.backend_tensor_alloc(buffer, tensor, address)
            address += size

    def fill(self, tensor: Tensor, address: int) -> None:
        """Rearrange a matrix that lies at this address as a file has it."""
        self._ggml.backend_tensor_set(tensor, address, 0, self._ggml.nbytes(tensor))


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment

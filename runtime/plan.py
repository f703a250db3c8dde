"""The memory plan: what a model will take, and how many row cache slots fit beside it.

Counts anonymous memory, which no system can take back, of one loaded model with one generation.
The embedding is not in it: it is read in place from the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle import BACKBONE_DATA, WEIGHT_BITS, Bundle, Manifest
from stem_edge.errors import MemoryPlanError
from stem_edge.graph_io import head_width
from stem_edge.quantize import fitting_block
from stem_edge.runtime.cache import RowCache
from stem_edge.shards import CRC_NBYTES
from stem_edge.units import parse_size

# Prompt tokens in one step: matrices reach their speed at about this many, memory grows with it.
CHUNK_TOKENS = 128
SMALLEST_CHUNK = 16
# A larger chunk is taken only if it leaves a row cache of this many times as many slots.
SLOTS_PER_CHUNK_TOKEN = 8
# Without a limit the row cache takes this much: a few percent of a 1B model's tables.
DEFAULT_CACHE_NBYTES = 256 << 20
FLOAT = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part, and the numbers they follow from."""

    context_length: int
    chunk_tokens: int
    slots: int
    weights: int  # matrices, which onnxruntime rearranges into its own memory
    kv_cache: int
    activations: int
    reads: int  # records on their way from flash
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
            ("reads", self.reads),
            (f"row cache of {self.slots} slots", self.row_cache),
        ]


def plan_memory(bundle: Bundle, context_length: int, memory: int | str | None) -> MemoryPlan:
    """The plan with the most slots under `memory`; raises MemoryPlanError if even the least
    (chunks and slots for SMALLEST_CHUNK tokens) does not fit."""
    limit = None if memory is None else parse_size(memory)
    chunk = CHUNK_TOKENS
    while chunk > SMALLEST_CHUNK:
        wanted = min(SLOTS_PER_CHUNK_TOKEN * chunk, bundle.manifest.model.vocab_size)
        if limit is None or _plan(bundle, context_length, chunk, wanted).total <= limit:
            break
        chunk //= 2
    least = _plan(bundle, context_length, chunk, chunk)
    if limit is not None and least.total > limit:
        parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in least.parts())
        raise MemoryPlanError(
            f"memory of {limit:,} bytes is too small for {bundle.path}: at least {least.total:,} "
            f"bytes are needed ({parts}); allow more or shorten the context"
        )
    return _plan(bundle, context_length, chunk, _slots(bundle.manifest, least, limit))


def _slots(manifest: Manifest, least: MemoryPlan, limit: int | None) -> int:
    """Slots that fit into what the least plan leaves."""
    each = RowCache.slot_nbytes(manifest.tables)
    spare = DEFAULT_CACHE_NBYTES - least.row_cache if limit is None else limit - least.total
    return min(manifest.model.vocab_size, least.slots + max(0, spare) // each)


def _plan(bundle: Bundle, context: int, chunk: int, slots: int) -> MemoryPlan:
    config, layout = bundle.manifest.model, bundle.manifest.tables
    heads, width = config.n_heads, head_width(config)
    # Hidden states and their norms, q, k and v, attention weights, gate and row with their product.
    per_token = 6 * config.dim + 2 * (heads + 2 * config.n_kv_heads) * width + 4 * config.d_ff
    slots = min(slots, config.vocab_size)
    return MemoryPlan(
        context_length=context,
        chunk_tokens=min(chunk, slots),
        slots=slots,
        weights=_weights_nbytes(bundle.manifest),
        kv_cache=2 * config.n_layers * config.n_kv_heads * context * width * FLOAT,
        activations=FLOAT * (chunk * (per_token + heads * context) + 2 * config.vocab_size),
        reads=2 * chunk * (layout.record_nbytes + CRC_NBYTES),
        row_cache=slots * RowCache.slot_nbytes(layout) + 8 * config.vocab_size,
    )


def _weights_nbytes(manifest: Manifest) -> int:
    """External data without the embedding, which stays mapped from its file."""
    config, bits = manifest.model, WEIGHT_BITS[manifest.backbone.head]
    embedding = config.vocab_size * config.dim * bits // 8
    if bits != 32:
        groups = config.dim // fitting_block(config.dim, manifest.backbone.block_size)
        embedding += config.vocab_size * (groups * FLOAT + -(-groups * bits // 8))
    return max(0, manifest.files[BACKBONE_DATA].nbytes - embedding)

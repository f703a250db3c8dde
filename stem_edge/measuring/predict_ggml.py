"""Memory that a run on ggml is expected to take, read off measured runs.

Weights are used in place in their file, so beside the copies that repacking makes, only what
operators compute, keys and values, and rows are memory of the process.
"""

from __future__ import annotations

from stem_edge import ggml_types
from stem_edge.footprint import FLOAT, Footprint
from stem_edge.formats import GgufFormat
from stem_edge.gguf_schema import repacked_nbytes
from stem_edge.measuring.usage import Held, Usage
from stem_edge.runtime.ggml_graph import CELLS
from stem_edge.runtime.ggml_weights import repacked_for_prompts
from stem_edge.runtime.plan import MemoryPlan

# Of the library, its threads, the descriptions of tensors and of the graphs of a context.
LIBRARY_NBYTES = 3_000_000
# Arrays of d_ff values, and of hidden states, alive at once for each token of a prompt chunk.
WIDE_ARRAYS, NARROW_ARRAYS = 2.5, 3
# Around a row of the embedding, the system maps so much.
MAPPED_AROUND_ROW = 40_000


def held_by_ggml(
    footprint: Footprint, plan: MemoryPlan, usage: Usage, base: int, *, repack: bool
) -> Held:
    """`base`: anonymous memory of the process before anything is loaded, tokenizer included."""
    kv_cache = footprint.kv_nbytes(min(plan.context_length, usage.tokens))
    row_cache = usage.filled_slots * footprint.slot_nbytes if footprint.tables else 0
    repacked = footprint.repacked_nbytes if repack else 0
    running = kv_cache + row_cache + _activations(footprint, plan, usage)
    mapped = _mapped(footprint, usage) - (_never_read(footprint) if repack else 0)
    return Held(base + LIBRARY_NBYTES + repacked + running, kv_cache, mapped, mapped)


def _activations(footprint: Footprint, plan: MemoryPlan, usage: Usage) -> int:
    """Of the largest chunk of the prompt, its mask, and records on their way."""
    model, chunk = footprint.model, min(plan.chunk_tokens, usage.prompt_tokens)
    heads = model.n_heads + 2 * model.n_kv_heads
    per_token = NARROW_ARRAYS * model.dim + heads * model.head_dim + WIDE_ARRAYS * model.d_ff
    cells = -(-usage.prompt_tokens // CELLS) * CELLS
    masks = len({model.window(n) for n in range(model.n_layers)}) * chunk * cells
    records = 0
    if (tables := footprint.tables) is not None:
        records = 2 * min(chunk, tables.records) * tables.record_nbytes
    values = chunk * per_token + 2 * model.vocab_size
    return int(FLOAT * values) + ggml_types.F16.nbytes * masks + records


def _never_read(footprint: Footprint) -> int:
    """Of the file: matrices whose copies serve for prompts, too."""
    if not isinstance(footprint.backbone, GgufFormat):
        return 0
    copied = repacked_nbytes(footprint.model, footprint.backbone.weights)
    return sum(nbytes for kind, nbytes in copied.items() if repacked_for_prompts(kind))


def _mapped(footprint: Footprint, usage: Usage) -> int:
    """A step reads all weights; of an embedding that is no head, what lies around the rows used."""
    touched = min(usage.distinct_tokens * MAPPED_AROUND_ROW, footprint.embedding_nbytes)
    return min(footprint.step_nbytes + touched, footprint.backbone_nbytes)

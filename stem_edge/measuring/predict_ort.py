"""Memory that a run on onnxruntime is expected to take, read off measured runs."""

from __future__ import annotations

from stem_edge.footprint import FLOAT, Footprint
from stem_edge.graph.names import head_width
from stem_edge.measuring.usage import Held, Usage
from stem_edge.prefill_check import PREFILL_FROM
from stem_edge.runtime.plan import MemoryPlan

# Of sessions beside their weights; of one more for prompts.
SESSIONS_NBYTES, PREFILL_SESSION_NBYTES = 6_000_000, 4_500_000
# Packed in memory, matrices are padded; packed in a file, too.
PACKED_OVER_DATA, PREPARED_OVER_DATA = 1.05, 1.07
# While sessions over mapped weights are made, so much of the data is in memory for a moment.
LOADING_SHARE = 0.07
# Arrays of d_ff values alive at once for each token of a prompt chunk, in a STEM model and a dense one.
WIDE_ARRAYS_OF_STEM, WIDE_ARRAYS_OF_DENSE = 7.5, 2.7
# Of the scores of a chunk's tokens with all before them, what is in memory at once.
ATTENTION_SHARE = 0.4
# Of the embedding, its scales are read whole; of its codes, what the system maps around a row.
EMBEDDING_SHARE, MAPPED_AROUND_ROW = 0.26, 40_000
# Around the small tensors of each graph, wherever they are read, the system maps so much.
MAPPED_AROUND_GRAPH, GRAPHS = 1 << 16, 6


def held_by_ort(
    footprint: Footprint,
    plan: MemoryPlan,
    usage: Usage,
    base: int,
    *,
    prepared: bool,
    prefill: bool,
) -> Held:
    """`base`: anonymous memory of the process before anything is loaded, tokenizer included."""
    prefill = prefill and footprint.prefill_nbytes > 0
    kv_cache = footprint.kv_nbytes(min(plan.context_length, usage.tokens))
    fixed = base + SESSIONS_NBYTES
    data = footprint.step_nbytes + (footprint.prefill_nbytes if prefill else 0)
    if prepared:
        fixed += PREFILL_SESSION_NBYTES if prefill else 0
    else:
        fixed += int(PACKED_OVER_DATA * data)
    row_cache = usage.filled_slots * footprint.slot_nbytes if footprint.tables else 0
    loading = fixed + (int(LOADING_SHARE * footprint.prefill_nbytes) if prepared and prefill else 0)
    running = fixed + kv_cache + row_cache + _activations(footprint, plan, usage)
    decoding, both = _mapped(footprint, usage, prepared=prepared, prefill=prefill)
    return Held(max(loading, running), kv_cache, both, decoding)


def _activations(footprint: Footprint, plan: MemoryPlan, usage: Usage) -> int:
    """Of the last chunk of the prompt, which attends to all of it, and records on their way."""
    model, chunk = footprint.model, min(plan.chunk_tokens, usage.prompt_tokens)
    stem = footprint.tables is not None
    wide = WIDE_ARRAYS_OF_STEM if stem else WIDE_ARRAYS_OF_DENSE
    per_token = 8 * model.dim + wide * model.d_ff
    per_token += 2 * (model.n_heads + 2 * model.n_kv_heads) * head_width(model)
    attention = ATTENTION_SHARE * model.n_heads * usage.prompt_tokens
    values = chunk * (per_token + attention) + 2 * model.vocab_size
    records = 0
    if (tables := footprint.tables) is not None:
        records = 2 * min(chunk, tables.records) * tables.record_nbytes
    return int(FLOAT * values + records)


def _mapped(
    footprint: Footprint, usage: Usage, *, prepared: bool, prefill: bool
) -> tuple[int, int]:
    """Pages that decoding reads, and those of the prompt with them."""
    touched = int(EMBEDDING_SHARE * footprint.embedding_nbytes)
    touched += usage.distinct_tokens * MAPPED_AROUND_ROW
    touched = min(touched, footprint.embedding_nbytes)
    if not prepared:
        touched += GRAPHS * MAPPED_AROUND_GRAPH
        return touched, touched
    decoding = touched + int(PREPARED_OVER_DATA * footprint.step_nbytes)
    uses_prefill = prefill and usage.prompt_tokens >= PREFILL_FROM
    return decoding, decoding + (footprint.prefill_nbytes if uses_prefill else 0)

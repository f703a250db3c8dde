"""The loader of the ggml engine, and the memory that the engine needs."""

from __future__ import annotations

from stem_edge.bundle.footprint import FLOAT, HALF, Footprint, footprint_of
from stem_edge.bundle.manifest import digest
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.ggml.gguf_schema import KV_TENSORS
from stem_edge.ggml.gguf_tensors import locate
from stem_edge.ggml.installed import installed_library, library_files
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import GGUF
from stem_edge.graph.names import kv_capacity
from stem_edge.runtime.backends.costs import Needs, Part
from stem_edge.runtime.backends.ggml.backend import GgmlBackend
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS
from stem_edge.runtime.backends.options import LoadOptions

FIXED_NBYTES = 4 << 20  # the library, descriptions of tensors and graphs
TILE = 64  # tokens, and cells, in a thread's tile of attention
MOST_THREADS = 512  # GGML_MAX_N_THREADS


def loader(bundle: Bundle, options: LoadOptions) -> GgmlLoader:
    installed_library()
    usual = {"provider": "cpu", "device_memory": None}
    if absent := [name for name, value in usual.items() if getattr(options, name) != value]:
        raise InputError(
            f"{', '.join(absent)}: not supported by the engine in use, ggml; leave it out, or choose another engine"
        )
    if options.cpus > MOST_THREADS:
        raise InputError(f"threads is {options.cpus}; ggml takes at most {MOST_THREADS}")
    return GgmlLoader(bundle, options)


def version() -> str:
    """Return a digest of the library's files, which have no common version number."""
    return digest(*library_files(installed_library()))


class GgmlLoader:
    """Loads backbone.gguf on ggml, with tensor offsets from the manifest; see EngineLoader."""

    name = "ggml"
    step_costs, slots = None, BlockSlots

    def __init__(self, bundle: Bundle, options: LoadOptions) -> None:
        self._bundle, self._options = bundle, options
        self._footprint = footprint_of(bundle.manifest).with_kv(options.kv)

    def prepare(self) -> None:
        self._ggml = Ggml(installed_library())

    def needs(self, context: int) -> Needs:
        return needs(self._footprint, context, self._options.cpus)

    def open(self, slots: BlockSlots | None) -> GgmlBackend:
        manifest, options = self._bundle.manifest, self._options
        if manifest.gguf is None:
            raise BackendError(f"{self._bundle.path}: has no {GGUF}; choose another engine")
        weights, nbytes = manifest.gguf.weights, manifest.files[GGUF].nbytes
        model = GgmlModel(
            self._ggml,
            manifest.model,
            locate(self._bundle.file(GGUF), nbytes, manifest.model, weights),
            slots,
            options.cpus,
            KV_TENSORS[self._footprint.kv],
        )
        return GgmlBackend(model)


def needs(footprint: Footprint, context: int, threads: int) -> Needs:
    """Return the memory needs of a backbone on ggml; its weights are mapped from their file."""
    config = footprint.model
    heads = max((config.n_heads + 2 * one.n_kv_heads) * one.head_dim for one in config.layers)
    # Values per token: gate, up and their product beside the hidden state, or q, k and v before and after RoPE;
    # their 8-bit copies; RoPE's cosines and sines, in numpy's memory and in ggml's.
    per_token = 3 * config.dim + heads + 4 * max(heads, *(layer.d_ff for layer in config.layers))
    if config.row_window:  # rows before their mean, turned, and their shares in it
        per_token += 2 * config.mixed_rows * config.d_ff + 2 * (CHUNK_TOKENS + config.row_window)
    if config.row_experts:  # rows before they are mixed, as they are and turned
        per_token += 2 * config.row_experts * config.d_ff
    per_token += 4 * sum(rope.width for rope in config.ropes)
    cells = [kv_capacity(window, context) for window in {one.window for one in config.layers}]
    masks = HALF * (sum(cells) + max(cells))  # one more, because numpy makes it before ggml's copy
    # Logits of a position, in ggml's memory and in ours, and their copy for sampling.
    logits = FLOAT * 3 * config.vocab_size
    # A thread's tile: queries, keys, values, their sums; scores and masks.
    head_dim = max(layer.head_dim for layer in config.layers)
    tile = FLOAT * (4 * TILE * head_dim + 2 * TILE * TILE)
    part = Part(
        weights=FIXED_NBYTES,
        kv_cache=footprint.kv_nbytes(context),
        fixed=logits + threads * tile,
        chunk_token=FLOAT * per_token + masks,
        logits=logits,
    )
    return Needs(footprint, context, part, mapped=footprint.step_nbytes)

"""Plans a load: chooses the engine's loader, the KV cache type and the context length."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.files.names import cache_folder
from stem_edge.runtime.backends.engines import choose_engine, loader
from stem_edge.runtime.backends.memory_plan import USUAL_CONTEXT, MemoryPlan, Room, plan_memory
from stem_edge.runtime.backends.options import SMALL_KV, LoadOptions
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.text.kept import kept_file
from stem_edge.shown import parse_size
from stem_edge.system.memory import available_memory, own_memory

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import EngineLoader


def open_text(bundle: Bundle, options: LoadOptions) -> TextCodec:
    """Open the tokenizer. Raises BundleError; MemoryPlanError if it exceeds the memory limit.

    If options.memory is set, this reads the whole tokenizer, because memory may be full later.
    """
    path, size, limit = bundle.file(TOKENIZER), bundle.manifest.model.vocab_size, options.limit
    kept = None
    with suppress(InputError, OSError):
        if options.weights == "prepared":  # an export that measures its own result caches nothing
            kept = kept_file(cache_folder(options.cache_dir), path, size)
    text = TextCodec(path, size, limit, kept)
    if options.memory is not None:
        text.read_whole(limit)
    return text


def room_of(bundle: Bundle, options: LoadOptions, later: int) -> Room:
    """Return the memory that a plan may use. later: bytes that this process will need in addition to the model."""
    if (layout := bundle.manifest.tables) is not None and bundle.tables is not None:
        from stem_edge.runtime.rows.remote import reading_nbytes  # only for remote tables

        later += reading_nbytes(layout)
    memory = None if options.memory is None else parse_size(options.memory)
    slots = bundle.manifest.model.records if options.resident else options.slots
    requests = options.requests
    process, available = own_memory() + later, available_memory() - later
    return Room(process, available, memory, slots, options.sequences, later, requests)


def loader_of_kv(
    bundle: Bundle, engine: str, options: LoadOptions, later: int
) -> tuple[EngineLoader, MemoryPlan]:
    """Choose the KV cache type; return the engine's loader, and the plan.

    With kv="auto", the type is the engine's usual one, or int8 if that allows only a short context.
    later: bytes that this process will need in addition to the model. Raises MemoryPlanError.
    """
    usual = loader(bundle, engine, options)  # first, because it imports the engine's library
    room = room_of(bundle, options, later)
    if options.kv == "auto":
        with suppress(MemoryPlanError):
            plan = plan_load(bundle, usual, options, room)
            if plan.context_length >= min(USUAL_CONTEXT, options.contexts(bundle)[0]):
                return usual, plan
        with suppress(InputError, MemoryPlanError):
            small = dataclasses.replace(options, kv=SMALL_KV)
            fitting = loader(bundle, engine, small)
            return fitting, plan_load(bundle, fitting, small, room)
    return usual, plan_load(bundle, usual, options, room)


def plan_load(bundle: Bundle, loader: EngineLoader, options: LoadOptions, room: Room) -> MemoryPlan:
    """Choose a context length and plan memory for it. Raises MemoryPlanError."""
    return plan_memory(bundle.path, options.contexts(bundle), loader.needs, room)


def plan_alone(bundle: Bundle, options: LoadOptions) -> tuple[EngineLoader, MemoryPlan]:
    """Return the engine's loader, and the plan of a load, without loading. Raises MemoryPlanError."""
    engine = choose_engine(bundle, options.engine)
    # Read as `load` does, because the memory that this process keeps from it counts.
    return loader_of_kv(bundle, engine, options, open_text(bundle, options).nbytes_to_come)

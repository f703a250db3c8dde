"""The bundle of a smaller model that drafts, and how it is loaded."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backends.memory_plan import USUAL_CONTEXT
from stem_edge.runtime.backends.options import LoadOptions

SLOTS = 1024  # of its row cache: as many tokens occur again and again in a text


def draft_bundle(
    bundle: Bundle, path: str | Path, options: LoadOptions
) -> tuple[Bundle, LoadOptions]:
    """Open the bundle that drafts for another; return it with the options to load it with.

    Raises BundleError; InputError if the two have different token ids.
    """
    found, own = open_bundle(path), bundle.manifest
    files, model = found.manifest.files, found.manifest.model
    tokenizers = files[TOKENIZER].sha256, own.files[TOKENIZER].sha256
    if tokenizers[0] != tokenizers[1] or model.vocab_size != own.model.vocab_size:
        raise InputError(
            f"{found.path}: has another tokenizer than {bundle.path}; give a draft with the same one"
        )
    length = min(options.context_length or USUAL_CONTEXT, model.max_context)
    chosen = LoadOptions(
        threads=options.threads,
        context_length=length,
        slots=min(model.records, SLOTS) or None,
        warm_start=options.warm_start,
        cache_dir=options.cache_dir,
        emulate_flash=options.emulate_flash,
        speculate=False,
        progress=options.progress,
    )
    return found, chosen

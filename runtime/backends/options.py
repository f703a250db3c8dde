"""The keyword arguments of stem_edge.load as one object that is validated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.graph.kv import KV_CHOICES, KvChoice, KvType
from stem_edge.runtime.backends.costs import MOST, StepCosts
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS, SHORTEST_CONTEXT
from stem_edge.runtime.rows.rows import FlashName
from stem_edge.shown import check_known, parse_size, shown
from stem_edge.system.memory import available_memory, check_threads, own_memory, usable_cpus

# kv="auto" chooses this type of keys and values if the engine's usual type does not fit into memory.
SMALL_KV: KvType = "int8"
AUTO = "auto"  # the engine that the bundle's backbone is made for
Folder: TypeAlias = str | Path | None
# Matrices of onnxruntime on the CPU: mapped from prepared files if the model is large, or packed in memory.
Weights: TypeAlias = Literal["prepared", "packed"]
# (token ids of the prompt and its answer so far, most drafts) -> drafts of the next tokens.
Draft: TypeAlias = Callable[[Sequence[int], int], Sequence[int]]
# True or False: draft tokens or not; a number: at most so many drafts for a step; a function: drafts tokens.
Speculate: TypeAlias = Literal["auto"] | int | Draft
INTERNAL = frozenset(("weights", "overlap", "emulate_flash", "requests"))


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Validated keyword arguments of stem_edge.load, which explains them. Raises InputError."""

    memory: int | str | None = None
    threads: int | None = None
    provider: str = "cpu"
    context_length: int | None = None
    engine: str = AUTO  # or a key of ENGINES (engines.py)
    device_memory: int | str | None = None
    slots: int | None = None
    sequences: int = 1
    resident: bool = False
    kv: KvChoice = "auto"
    cache_dir: Folder = None
    tables: str | None = None
    prompt_cache: Literal[True] | Folder = None
    speculate: Speculate = "auto"
    exact: bool = False
    progress: bool | None = None
    # INTERNAL: what measurements, checks and exports choose.
    weights: Weights = "prepared"
    overlap: bool = True  # read rows ahead in a thread
    emulate_flash: FlashName | None = None  # delay reads like slower flash
    requests: int = 0  # bytes that a server needs for requests

    def __post_init__(self) -> None:
        for name in ("threads", "context_length", "slots", "sequences"):
            value, default = getattr(self, name), getattr(LoadOptions, name)
            if value is not default and (
                isinstance(value, bool) or not isinstance(value, Integral)
            ):
                raise InputError(f"{name} is {shown(value)}; expected a whole number")
        check_threads(self.threads, InputError)
        check_sequences(self.sequences)
        if self.kv not in KV_CHOICES:
            raise InputError(f"kv is {self.kv!r}; expected one of {', '.join(KV_CHOICES)}")
        if self.resident and self.slots is not None:
            raise InputError(
                f"slots is {self.slots}, but resident keeps the rows of every token; leave out one "
                "of the two"
            )
        number = isinstance(self.speculate, int) and 0 <= self.speculate < MOST
        if not (number or self.speculate == "auto" or callable(self.speculate)):
            raise InputError(
                f"speculate is {shown(self.speculate)}; expected 'auto', True (on), False (off), "
                f"the most tokens to draft for a step (up to {MOST - 1}), or a function that drafts"
            )
        if isinstance(self.prompt_cache, str | Path):
            _check_prompt_cache(Path(self.prompt_cache))
        for size in (self.memory, self.device_memory):
            if size is not None:
                parse_size(size)

    def open(self, path: str | Path) -> Bundle:
        bundle = open_bundle(path, self.tables, progress=self.progress)
        if bundle.tables is not None:
            from stem_edge.runtime.rows.remote import open_url

            open_url(bundle.tables)  # now, because the memory plan counts what it imports
        return bundle

    def guesses_ahead(self, costs: StepCosts | None) -> bool:
        """True if the model drafts tokens: on request, or with "auto" if that changes no bits."""
        if self.speculate == "auto":
            return costs is not None and costs.same_bits
        return bool(self.speculate)

    @classmethod
    def public(cls, options: Mapping[str, Any]) -> Self:
        """Make options from a caller's keywords. Raises InputError for unknown keywords and those in INTERNAL."""
        check_known(options, [f.name for f in fields(cls) if f.name not in INTERNAL])
        return cls(**options)

    @property
    def cpus(self) -> int:
        return self.threads or usable_cpus()

    @property
    def limit(self) -> int:
        """Most bytes that this process may take: `memory`, or else what it takes and what is available."""
        return own_memory() + available_memory() if self.memory is None else parse_size(self.memory)

    def contexts(self, bundle: Bundle) -> list[int]:
        """Return the context lengths (prompt and answer, in tokens) to choose from, longest first. Raises InputError.

        Without `context_length`, these are the model's limit and smaller powers of two.
        """
        longest, context = bundle.manifest.model.max_context, self.context_length
        if context is None:
            powers = (
                1 << n for n in range(SHORTEST_CONTEXT.bit_length() - 1, longest.bit_length())
            )
            return sorted({longest, *powers}, reverse=True)
        if not 0 < context <= longest:
            raise InputError(
                f"context_length is {context}; this model takes 1 to {longest}; leave it out for what "
                "fits memory"
            )
        return [context]


def check_sequences(sequences: int) -> None:
    if not 1 <= sequences <= CHUNK_TOKENS:
        raise InputError(f"sequences is {sequences}; expected 1 to {CHUNK_TOKENS}")


def _check_prompt_cache(folder: Path) -> None:
    if "\0" in str(folder):
        raise InputError(
            f"prompt_cache is {str(folder)!r}; expected a name without null characters"
        )
    if (folder / MANIFEST).exists():  # a BUNDLE typed behind --prompt-cache is taken for its DIR
        raise InputError(f"{folder}: prompt_cache is a bundle; give another folder")

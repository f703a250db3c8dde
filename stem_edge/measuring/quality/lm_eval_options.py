"""Options of lm-evaluation-harness, converted to those of loading and sampling here."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from stem_edge.errors import InputError
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.sampling_params import SamplingParams

AUTO_SEQUENCES = 8
# Names that tasks use for the most tokens to generate; the first one given counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty")
GENERATION = (*LENGTHS, "until", "do_sample", "temperature", "seed", *FILTERS)


def converted(name: str, value: object, wanted: Any) -> Any:
    """Convert a value; the command line gives texts, numbers, True and None. Raises InputError."""
    try:
        return msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"the option {name} is {value!r}: {error}") from None


def sequences(batch_size: int | str | None, most: int | str | None) -> int:
    """Return the texts to generate at a time, from what the harness passes. Raises InputError."""
    if isinstance(batch_size, str) and batch_size.startswith("auto"):
        batch_size = AUTO_SEQUENCES if most is None else most
    found: int = converted("batch_size", 1 if batch_size is None else batch_size, int)
    return found


def load_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Convert options of stem_edge.load to the types that LoadOptions declares."""
    known = list(inspect.signature(LoadOptions).parameters)
    if unknown := sorted(set(given) - set(known)):
        raise InputError(
            f"unknown option {', '.join(unknown)}; expected some of: bundle, max_gen_toks, reuse, "
            f"{', '.join(known)}"
        )
    types = typing.get_type_hints(LoadOptions) | {"cache_dir": str | None}
    return {name: converted(name, value, types[name]) for name, value in given.items()}


def sampling_params(
    options: Mapping[str, Any], max_new_tokens: int, number: int = 0
) -> SamplingParams:
    """Convert the `generation_kwargs` of a task.

    `max_new_tokens` is used if they give no length. As in the harness, a temperature asks for
    sampling unless `do_sample` is False. Raises InputError for options unknown or out of range.
    """
    if unknown := sorted(set(options) - set(GENERATION)):
        raise InputError(
            f"unknown generation option {', '.join(unknown)}; expected some of: "
            f"{', '.join(GENERATION)}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    until = given.get("until", [])
    stop = converted("until", [until] if isinstance(until, str) else until, list[str])
    sample = converted("do_sample", given.get("do_sample", bool(given.get("temperature"))), bool)
    wanted = {
        "max_new_tokens": next((given[n] for n in LENGTHS if n in given), max_new_tokens),
        "temperature": given.get("temperature", 1.0) if sample else 0.0,
        "stop": [text for text in stop if text],
        "seed": number + converted("seed", given.get("seed", 0), int),
    }
    wanted |= {name: given[name] for name in FILTERS if name in given}
    types = typing.get_type_hints(SamplingParams)
    typed = msgspec.defstruct("Wanted", [(name, types[name]) for name in wanted])
    found = converted("generation_kwargs", wanted, typed)
    return SamplingParams(**msgspec.structs.asdict(found))

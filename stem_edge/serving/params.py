"""How the tokens of an answer are chosen, with errors that name the field of an interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.serving.refusals import RefusalError

T = TypeVar("T")


def params_of(names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """Return what to sample by. Raises RefusalError.

    names: what the interface calls fields of SamplingParams for which it has other names.
    """
    try:
        return SamplingParams(**fields)
    except InputError as error:
        name, _, rest = str(error).partition(" ")
        name = names.get(name, name)
        raise RefusalError(f"{name} {rest}", name) from None


def grammar_of(field: str, make: Callable[[T], Grammar], given: T) -> Grammar:
    """Return the grammar that a field gives. Raises RefusalError."""
    try:
        return make(given)
    except InputError as error:
        raise RefusalError(f"{field}: {error}", field) from None


def check_grammar(model: Model, params: SamplingParams, field: str) -> None:
    """Compile the grammar that a field gave, if any, which is kept. Raises RefusalError."""
    if params.grammar is None:
        return
    try:
        model.check_grammar(params.grammar)
    except InputError as error:
        raise RefusalError(f"{field}: {error}", field) from None

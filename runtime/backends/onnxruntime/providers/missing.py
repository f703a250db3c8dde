"""Operators of a graph that a provider lacks, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from stem_edge.errors import BackendError, MissingOperatorsError
from stem_edge.runtime.backends.interface import check_device
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider, ort

NAMING_OPERATORS = {"session.record_ep_graph_assignment_info": "1"}


def raise_missing(
    graph: object,
    providers: Sequence[Provider],
    again: Callable[[Mapping[str, str]], ort.InferenceSession],
    refused: Exception,
) -> NoReturn:
    """Raise MissingOperatorsError.

    again: loads the graph with more settings, and with the CPU, to see what goes there.
    """
    operators: tuple[str, ...] = ()
    try:
        operators = _elsewhere(again(NAMING_OPERATORS), {provider.full for provider in providers})
    except BackendError:
        raise
    except Exception as error:  # then the operators stay unnamed, rather than failing twice
        check_device(error, f"to load {graph}")
    named, who = ", ".join(operators) or "all operators", [provider.name for provider in providers]
    raise MissingOperatorsError(
        f"{' and '.join(who)} cannot run {named} of {graph}; choose another provider, or add cpu "
        "as the last of providers to run them there",
        operators,
    ) from refused


def _elsewhere(session: ort.InferenceSession, allowed: set[str]) -> tuple[str, ...]:
    """Return the operators that run on other providers than these, in the order of the graph."""
    parts = session.get_provider_graph_assignment_info()
    nodes = [node for part in parts if part.ep_name not in allowed for node in part.get_nodes()]
    return tuple(dict.fromkeys(str(node.op_type) for node in nodes))

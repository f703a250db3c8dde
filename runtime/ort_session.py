"""onnxruntime sessions with the settings that keep their memory small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from stem_edge.errors import BackendError, MissingOperatorsError
from stem_edge.runtime.backend import check_device, reason
from stem_edge.runtime.ort_module import ort
from stem_edge.runtime.provider_start import LOG_FATAL_ONLY
from stem_edge.runtime.providers import Provider

# Smaller tensors are written into the graph. Shape inference needs the smallest there; scales must
# not be there: 1.31.1 then forgets them when it saves what it packed, and computes nonsense.
LEAST_EXTERNAL_NBYTES = "64"
# What onnxruntime says when a node would go to the CPU that must not; it does not say which.
REFUSED = "fallback to CPU EP has been explicitly disabled"


def open_session(
    path: Path, threads: int, providers: Sequence[Provider], *, save_to: Path | None = None
) -> ort.InferenceSession:
    """Load a graph. Without the CPU among the providers, every operator must run on one of them.

    save_to: also write the graph there as it was rearranged for this processor, with its weights
    in a file of the same name and .data; loaded from there, they stay in the file.

    Raises BackendError, MissingOperatorsError, DeviceLostError, OutOfMemoryError.
    """
    options = _options(threads, save_to)
    strict = not any(provider.on_cpu for provider in providers)
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = _open(path, options, providers)
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        check_device(error, f"to load {path}")
        if strict and REFUSED in str(error):
            _raise_missing(path, threads, providers, error)
        who, advice = "", "run stem-edge verify, or export again"
        if not providers[0].on_cpu:
            who, advice = f" on {_names(providers)}", "choose another provider, or leave it out"
        raise BackendError(
            f"{path}: onnxruntime {ort.__version__} cannot load this graph{who} ({reason(error)}); "
            f"{advice}"
        ) from error
    _check_started(path, session, providers)
    return session


def _options(threads: int, save_to: Path | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # onnxruntime also writes what it raises to stderr; users shall read our error, once.
    options.log_severity_level = LOG_FATAL_ONLY
    # The arena would keep what the longest prompt chunk once needed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Threads spin between the operators of a step, and stop when the step is done.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
        prefix = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(prefix + "file_name", save_to.name + ".data")
        options.add_session_config_entry(prefix + "min_size_in_bytes", LEAST_EXTERNAL_NBYTES)
        options.add_session_config_entry(
            "session.save_external_prepacked_constant_initializers", "1"
        )
    return options


def _open(
    path: Path, options: ort.SessionOptions, providers: Sequence[Provider]
) -> ort.InferenceSession:
    """Plug-ins go in by their devices, built-in providers by their names: not both in one session."""
    plugged = [provider for provider in providers if provider.devices]
    if not plugged:
        return ort.InferenceSession(
            str(path),
            options,
            providers=[(provider.full, dict(provider.options)) for provider in providers],
            enable_fallback=False,  # it would print, and try the same again
        )
    for provider in plugged:
        options.add_provider_for_devices(list(provider.devices), dict(provider.options))
    # The CPU is always there in the end.
    return ort.InferenceSession(str(path), options, enable_fallback=False)


def _check_started(
    path: Path, session: ort.InferenceSession, providers: Sequence[Provider]
) -> None:
    """onnxruntime leaves out a provider that cannot start, without an error."""
    missing = [p.name for p in providers if p.full not in session.get_providers()]
    if missing:
        raise BackendError(
            f"{path}: onnxruntime {ort.__version__} did not start {', '.join(missing)} and says not "
            f"why; it used {', '.join(session.get_providers())}"
        )


def _raise_missing(
    path: Path, threads: int, providers: Sequence[Provider], refused: Exception
) -> NoReturn:
    """Load it once more, with the CPU, to see which operators go there."""
    operators: tuple[str, ...] = ()
    options = _options(threads, None)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = _open(path, options, providers)
    except Exception as error:  # as in open_session; then the first refusal has to do
        check_device(error, f"to load {path}")
    else:
        _check_started(path, session, providers)
        operators = _elsewhere(session, {provider.full for provider in providers})
    named = ", ".join(operators) or "all operators"
    raise MissingOperatorsError(
        f"{_names(providers)} cannot run {named} of {path}; choose another provider, or add cpu at "
        "the end of providers, where these would run",
        operators,
    ) from refused


def _elsewhere(session: ort.InferenceSession, allowed: set[str]) -> tuple[str, ...]:
    """Operators that run on other providers than these, in the order of the graph."""
    parts = session.get_provider_graph_assignment_info()
    nodes = [node for part in parts if part.ep_name not in allowed for node in part.get_nodes()]
    return tuple(dict.fromkeys(str(node.op_type) for node in nodes))


def _names(providers: Sequence[Provider]) -> str:
    return " and ".join(provider.name for provider in providers)

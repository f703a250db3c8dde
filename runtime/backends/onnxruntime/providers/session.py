"""onnxruntime sessions with the settings that keep them exact, and their memory small.

Every session of this project is opened by `new_session`, those of tests and measurements as well:
one that was opened elsewhere would compute with other settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError, MissingOperatorsError
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.interface import DAMAGED, check_device, reason
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.names import CPU_NAME
from stem_edge.runtime.backends.onnxruntime.providers.ort_module import ort

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider

LOG_FATAL_ONLY = 4
# x86 processors without VNNI add pairs of products of u8 and s8 in 16 bits, where sums saturate:
# prompts through the int8 graph came out wrong there, without an error. With this, onnxruntime turns
# the weights into u8 as it loads them, whose products it widens: 1.3 times the time for 128 tokens.
# On others it does the same, for nothing, at 4.5 times the time, so it is set where they saturate.
EXACT_PRODUCTS = "session.x64quantprecision"
# Smaller tensors are written into the graph. Shape inference needs the smallest there; scales must
# not be there: 1.31.1 then forgets them when it saves what it packed, and computes nonsense.
LEAST_EXTERNAL_NBYTES = "64"
# Where the weights are of a graph that is given as bytes.
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# What onnxruntime says when a node would go to the CPU that must not; it does not say which.
REFUSED = "fallback to CPU EP has been explicitly disabled"
STRICT = {"session.disable_cpu_ep_fallback": "1"}
NAMING_OPERATORS = {"session.record_ep_graph_assignment_info": "1"}


def open_session(
    graph: Path | GraphSource,
    threads: int,
    providers: Sequence[Provider],
    *,
    save_to: Path | None = None,
) -> ort.InferenceSession:
    """Load a graph. Without the CPU among the providers, every operator must run on one of them.

    save_to: also write the graph there as it was rearranged for this processor, with its weights
    in a file of the same name and .data; loaded from there, they stay in the file.

    Raises BackendError, MissingOperatorsError, DeviceLostError, OutOfMemoryError.
    """
    strict = not any(provider.on_cpu for provider in providers)
    settings = (STRICT if strict else {}) | (_saving(save_to) if save_to is not None else {})
    try:
        session = new_session(graph, threads, providers, settings, save_to=save_to)
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        check_device(error, f"to load {graph}")
        if strict and REFUSED in str(error):
            _raise_missing(graph, threads, providers, error)
        who, advice = "", "run stem-edge verify, or export again"
        if not providers[0].on_cpu:
            who, advice = f" on {_names(providers)}", "choose another provider, or leave it out"
        raise BackendError(
            f"{graph}: onnxruntime {ort.__version__} cannot load this graph{who} ({reason(error)}); "
            f"{advice}"
        ) from error
    _check_started(graph, session, providers)
    return session


def new_session(
    graph: Path | GraphSource | bytes,
    threads: int,
    providers: Sequence[Provider],
    settings: Mapping[str, str] | None = None,
    *,
    save_to: Path | None = None,
) -> ort.InferenceSession:
    """Open a session over a file, a graph of ours, or the bytes of one without weights.

    Raises what onnxruntime raises. settings: entries of its configuration beside ours. Plug-ins go in by their devices, built-in
    providers by their names: not both in one session.
    """
    chosen = {EXACT_PRODUCTS: str(int(products_saturate()))} | dict(settings or {})
    if isinstance(graph, GraphSource):
        chosen[WEIGHTS_FOLDER] = str(graph.folder.absolute())
        graph = graph.data
    source = graph if isinstance(graph, bytes) else str(graph)
    options = _options(threads, chosen)
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    plugged = [provider for provider in providers if provider.devices]
    if not plugged:
        return ort.InferenceSession(
            source,
            options,
            providers=[(provider.full, dict(provider.options)) for provider in providers],
            enable_fallback=False,  # it would print, and try the same again
        )
    for provider in plugged:
        options.add_provider_for_devices(list(provider.devices), dict(provider.options))
    # The CPU is always there in the end.
    return ort.InferenceSession(source, options, enable_fallback=False)


def _options(threads: int, settings: Mapping[str, str]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # onnxruntime also writes what it raises to stderr; users shall read our error, once.
    options.log_severity_level = LOG_FATAL_ONLY
    # The arena would keep what the longest prompt chunk once needed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Threads spin between the operators of a step, and stop when the step is done.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in settings.items():
        options.add_session_config_entry(name, value)
    return options


@cache
def products_saturate() -> bool:
    """Whether sums of products of u8 and s8 are wrong on this processor, unless they are widened."""
    graph = Graph()
    graph.input("a", np.uint8, ["m", "k"])
    graph.input("b", np.int8, ["k", "n"])
    graph.output(graph.add("MatMulInteger", ["a", "b"], "y"), np.int32, ["m", "n"])
    session = ort.InferenceSession(encode(graph), _options(1, {}), providers=[CPU_NAME])
    a, b = np.full((4, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    (found,) = session.run(None, {"a": a, "b": b})
    return bool((found != 64 * 255 * 127).any())


def _saving(path: Path) -> dict[str, str]:
    """Settings for a graph that is saved with the weights as they were packed."""
    external = "session.optimized_model_external_initializers_"
    return {
        external + "file_name": path.name + ".data",
        external + "min_size_in_bytes": LEAST_EXTERNAL_NBYTES,
        "session.save_external_prepacked_constant_initializers": "1",
    }


def _check_started(
    graph: Path | GraphSource, session: ort.InferenceSession, providers: Sequence[Provider]
) -> None:
    """onnxruntime leaves out a provider that cannot start, without an error."""
    missing = [p.name for p in providers if p.full not in session.get_providers()]
    if missing:
        raise BackendError(
            f"{graph}: onnxruntime {ort.__version__} did not start {', '.join(missing)} and gives "
            f"no reason; it used {', '.join(session.get_providers())}"
        )


def _raise_missing(
    graph: Path | GraphSource, threads: int, providers: Sequence[Provider], refused: Exception
) -> NoReturn:
    """Load it once more, with the CPU, to see which operators go there."""
    operators: tuple[str, ...] = ()
    try:
        session = new_session(graph, threads, providers, NAMING_OPERATORS)
    except Exception as error:  # as in open_session; then the first refusal has to do
        check_device(error, f"to load {graph}")
    else:
        _check_started(graph, session, providers)
        operators = _elsewhere(session, {provider.full for provider in providers})
    named = ", ".join(operators) or "all operators"
    raise MissingOperatorsError(
        f"{_names(providers)} cannot run {named} of {graph}; choose another provider, or add cpu at "
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


@contextlib.contextmanager
def onnxruntime_errors(doing: str) -> Iterator[None]:
    """Raises what onnxruntime raises as OutOfMemoryError, DeviceLostError or BackendError."""
    try:
        yield
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        raise_failed(error, doing)


def raise_failed(error: Exception, doing: str) -> NoReturn:
    """Raises OutOfMemoryError, DeviceLostError or BackendError for what onnxruntime raised."""
    check_device(error, doing)
    raise BackendError(f"onnxruntime failed {doing}: {reason(error)}; {DAMAGED}") from error


class BoundSession:
    """Runs a graph over memory that is bound once.

    in_place: its provider reads the host's memory where it is. Others get a copy when it is bound.
    """

    def __init__(self, session: ort.InferenceSession, *, in_place: bool = False) -> None:
        self._session, self._binding, self._in_place = session, session.io_binding(), in_place
        self.inputs = {value.name for value in session.get_inputs()}
        self.outputs = {value.name for value in session.get_outputs()}
        self._bound: dict[str, ort.OrtValue] = {}  # alive what the binding points to
        self._fed: set[str] = set()

    def bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        """Bind those that this graph has, in place of what was bound to the same names.

        Raises as onnxruntime_errors.
        """
        known = {n: v for n, v in values.items() if n in self.inputs or n in self.outputs}
        with onnxruntime_errors("while memory was bound"):
            for name, value in known.items():
                if name in self.inputs:
                    self._binding.bind_ortvalue_input(name, value)
                else:
                    self._binding.bind_ortvalue_output(name, value)
        self._bound |= known

    def feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Bind arrays of the host to inputs, which each run reads as they are then."""
        self.bind({n: ort.OrtValue.ortvalue_from_numpy(array) for n, array in arrays.items()})
        self._fed |= arrays.keys() & self.inputs

    def unbind(self) -> None:
        """Let go of all memory; nothing can be run before it is bound again."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound.clear()
        self._fed.clear()

    def run(self) -> None:
        """Raises what onnxruntime raises."""
        if not self._in_place:
            for name in self._fed:
                self._binding.bind_ortvalue_input(name, self._bound[name])
        self._session.run_with_iobinding(self._binding)

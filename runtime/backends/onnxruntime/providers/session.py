"""Opens onnxruntime sessions, with settings for exact results and little memory.

All code of this project, tests and measurements included, must open sessions with `new_session`;
otherwise they would compute with other settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.runtime.backends.onnxruntime.providers import ort

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider

CPU_ALONE = ["CPUExecutionProvider"]
LOG_FATAL_ONLY = 4
# x86 processors without VNNI add pairs of products of u8 and s8 in 16 bits, where sums saturate, so
# that prompts through the int8 graph came out wrong without an error. With this setting,
# onnxruntime converts the weights to u8 on loading and widens their products: 1.3 times the time
# for 128 tokens. On other processors it only costs 4.5 times the time, so set it only where they saturate.
EXACT_PRODUCTS = "session.x64quantprecision"
# Smaller tensors are written into the graph file, where shape inference needs the smallest. Scales must stay
# outside: onnxruntime 1.31.1 loses scales in the file when it saves packed weights, and results are wrong.
LEAST_EXTERNAL_NBYTES = "64"
# Folder of the weight files of a graph that is given as bytes.
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Packs several matrices at once, with onnxruntime 1.32 and later; older ones ignore it.
PACK_IN_PARALLEL = "session.prepack.enable_parallel"
# Disables ARM's own kernels, which quantize inputs of 4-bit products by rows: they would not stay integers.
WHOLE_STEPS = {"mlas.disable_kleidiai": "1"}
# The file of a graph y = a [m, k] times b [k, n], u8 and s8, as graph/encoder.py writes it.
PRODUCT = (
    b'\x08\n\x12\tstem-edge:n\n\x1d\n\x01a\n\x01b\x12\x01y\x1a\x01y"\rMatMulInteger:\x00\x12\x08backbone'
    b"Z\x15\n\x01a\x12\x10\n\x0e\x08\x02\x12\n\n\x03\x12\x01m\n\x03\x12\x01k"
    b"Z\x15\n\x01b\x12\x10\n\x0e\x08\x03\x12\n\n\x03\x12\x01k\n\x03\x12\x01n"
    b"b\x15\n\x01y\x12\x10\n\x0e\x08\x06\x12\n\n\x03\x12\x01m\n\x03\x12\x01n"
    b"B\x04\n\x00\x10\x15B\x11\n\rcom.microsoft\x10\x01"
)


class GraphSource(NamedTuple):
    """A graph as an ONNX file in memory, and the folder of the weight files that it names."""

    name: str
    data: bytes
    folder: Path
    bundle: Path | None = None  # for messages, if the weight files lie elsewhere, in a hub's cache

    def __str__(self) -> str:
        return f"{self.bundle or self.folder} ({self.name})"


def open_session(
    graph: Path | GraphSource,
    threads: int,
    provider: Provider | None = None,
    *,
    save_to: Path | None = None,
    whole_steps: bool = False,
    as_built: bool = False,
) -> ort.InferenceSession:
    """Open an onnxruntime session for a graph: on the CPU, or with all operators on `provider`.

    save_to: also write the graph to this file, and its weights, packed for this processor, to the same name plus
    .data. A session of this file maps the weights. whole_steps: compute exact products in models whose inputs of
    matrices are integers times a scale. as_built: do not optimize the graph, because it was saved optimized.

    Raises BackendError, DeviceLostError, OutOfMemoryError.
    """
    settings = _save_settings(save_to) if save_to is not None else {}
    settings |= WHOLE_STEPS if whole_steps else {}
    try:
        plain = as_built and isinstance(graph, Path)
        session = new_session(graph, threads, provider, settings, save_to=save_to, as_built=plain)
    except Exception as error:  # because onnxruntime's exceptions share no base class
        from stem_edge.runtime.backends.onnxruntime.providers.errors import raise_load_error

        raise_load_error(error, graph, "" if provider is None else provider.name)
    if provider is not None:
        provider.check_started(graph, session)
    return session


def new_session(
    graph: Path | GraphSource | bytes,
    threads: int,
    provider: Provider | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    save_to: Path | None = None,
    as_built: bool = False,
) -> ort.InferenceSession:
    """Open a session over a file, a GraphSource, or the bytes of a graph without weight files.

    settings: additional session configuration entries. as_built: skip graph optimization. Raises what
    onnxruntime raises.
    """
    chosen = {EXACT_PRODUCTS: str(int(products_saturate()))} | dict(settings or {})
    if isinstance(graph, GraphSource):
        chosen[WEIGHTS_FOLDER] = str(graph.folder.absolute())
        graph = graph.data
    source = graph if isinstance(graph, bytes) else str(graph)
    options = _options(threads, chosen)
    if as_built:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    if provider is not None:
        return provider.open(source, options)
    # Without onnxruntime's own fallback, which would print to stdout and try a second time.
    return ort.InferenceSession(source, options, CPU_ALONE, enable_fallback=False)


def _options(threads: int, settings: Mapping[str, str]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # Otherwise onnxruntime also writes errors to stderr, and users read each of them twice.
    options.log_severity_level = LOG_FATAL_ONLY
    # The arena keeps the memory that the longest prompt chunk once needed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Threads may spin between the operators of a step, but must not after it.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(PACK_IN_PARALLEL, "1")
    for name, value in settings.items():
        options.add_session_config_entry(name, value)
    return options


@cache
def products_saturate() -> bool:
    """Return True if sums of u8 * s8 products saturate on this processor, which makes them wrong."""
    session = ort.InferenceSession(PRODUCT, _options(1, {}), providers=CPU_ALONE)
    a, b = np.full((4, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    (found,) = session.run(None, {"a": a, "b": b})
    return bool((found != 64 * 255 * 127).any())


def _save_settings(path: Path) -> dict[str, str]:
    external = "session.optimized_model_external_initializers_"
    return {
        external + "file_name": path.name + ".data",
        external + "min_size_in_bytes": LEAST_EXTERNAL_NBYTES,
        "session.save_external_prepacked_constant_initializers": "1",
    }


@contextlib.contextmanager
def onnxruntime_errors(doing: str) -> Iterator[None]:
    """Convert onnxruntime's errors in a `with` block to this package's. doing: what failed."""
    try:
        yield
    except Exception as error:  # because onnxruntime's exceptions share no base class
        from stem_edge.runtime.backends.onnxruntime.providers.errors import raise_error

        raise_error(error, doing)


class BoundSession:
    """Runs a session over inputs and outputs that are bound once and used by every run."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._binding = session.io_binding()
        # Runs the graph. Raises what onnxruntime raises.
        self.run = partial(session.run_with_iobinding, self._binding)
        self.inputs = {value.name for value in session.get_inputs()}
        self.outputs = {value.name for value in session.get_outputs()}
        self._bound: dict[str, ort.OrtValue] = {}  # keeps alive what the binding points to

    def bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        """Bind values by name to this graph's inputs and outputs; names that it lacks are ignored.

        Raises OutOfMemoryError, DeviceLostError, BackendError.
        """
        self._bound |= self.lend(values)

    def lend(self, values: Mapping[str, ort.OrtValue]) -> Mapping[str, ort.OrtValue]:
        """Bind those of `values` that the graph has, and return them. The caller keeps their memory alive."""
        known = {n: v for n, v in values.items() if n in self.inputs or n in self.outputs}
        with onnxruntime_errors("while memory was bound"):
            for name, value in known.items():
                if name in self.inputs:
                    self._binding.bind_ortvalue_input(name, value)
                else:
                    self._binding.bind_ortvalue_output(name, value)
        return known

    def feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Bind numpy arrays. On the CPU, each run reads their current contents; a device copies them now."""
        self.bind({n: ort.OrtValue.ortvalue_from_numpy(array) for n, array in arrays.items()})

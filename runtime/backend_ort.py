"""The backbone on onnxruntime: one session, everything bound in place, nothing copied by a step.

The slots of the row cache and the KV buffers are bound once per context. Small inputs live in fixed
arrays that a step overwrites; only the arrays whose length follows the number of tokens are bound
again when that number changes, which in decoding it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import onnxruntime as ort
except ImportError as error:
    from stem_edge.errors import BackendError

    raise BackendError(
        f"onnxruntime cannot be imported ({error}); install it with: pip install onnxruntime"
    ) from error

from stem_edge import graph_io as io
from stem_edge.bundle import BACKBONE, Bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables
from stem_edge.runtime.cache import RowCache

DEFAULT_PROVIDERS = ("CPUExecutionProvider",)
# onnxruntime also writes what it raises to stderr; users shall read our error, once.
LOG_FATAL_ONLY = 4


class OrtBackend:
    """One onnxruntime session over backbone.onnx. Raises BackendError."""

    def __init__(
        self, bundle: Bundle, cache: RowCache, threads: int, providers: Sequence[str] | None
    ) -> None:
        self.config = bundle.manifest.model
        wanted = list(providers or DEFAULT_PROVIDERS)
        self.session = _open_session(bundle, threads, wanted)
        self.rows = _row_inputs(cache)

    def open_context(self, length: int) -> OrtContext:
        """An empty context for up to `length` tokens."""
        return OrtContext(self.session, self.config, self.rows, length)

    def close(self) -> None:
        """Release the session."""
        del self.session


class OrtContext:
    """KV buffers and bindings of one generation."""

    def __init__(
        self,
        session: ort.InferenceSession,
        config: ModelConfig,
        rows: dict[str, ort.OrtValue],
        length: int,
    ) -> None:
        self.length, self._session, self._vocab = length, session, config.vocab_size
        self._binding = session.io_binding()
        self._seqlens_k = np.zeros(1, np.int32)
        self._total_length = np.zeros((), np.int32)
        self._logits_from = np.zeros(1, np.int64)
        self._shape = (-1, -1)  # tokens and logits of the arrays bound now
        self._bound: dict[str, ort.OrtValue] = {}  # keeps alive what the binding points to
        for name, value in rows.items():
            self._binding.bind_ortvalue_input(name, value)
        width = io.head_width(config)
        padding = ((0, 0), (0, (width - config.head_dim) // 2))
        cos, sin = (np.pad(table, padding) for table in rope_tables(config, length))
        fixed: dict[str, npt.NDArray[Any]] = {
            io.ROPE_COS: cos,
            io.ROPE_SIN: sin,
            io.SEQLENS_K: self._seqlens_k,
            io.TOTAL_LENGTH: self._total_length,
            io.LOGITS_FROM: self._logits_from,
        }
        for name, array in fixed.items():
            self._bind(name, array)
        # Zeroed pages are only taken from the system when a token first writes to them.
        shape = (1, config.n_kv_heads, length, width)
        for layer in range(config.n_layers):
            for kind in (io.KEYS, io.VALUES):
                cache = self._bind(f"{kind}{layer}", np.zeros(shape, np.float32))
                self._binding.bind_ortvalue_output(f"{io.NEW}{kind}{layer}", cache)

    def run(
        self,
        token_ids: npt.NDArray[np.int64],
        slot_ids: npt.NDArray[np.int32],
        position: int,
        logits_from: int,
    ) -> F32:
        """See BackendContext.run."""
        count = len(token_ids)
        self._bind_lengths(count, count - logits_from)
        self._token_ids[0], self._slot_ids[0] = token_ids, slot_ids
        self._total_length[...] = position + count
        self._seqlens_k[0] = position + count - 1
        self._logits_from[0] = logits_from
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises classes of its own that share no base
            raise BackendError(f"the backbone failed at position {position}: {error}") from error
        logits: F32 = self._logits[0]
        return logits

    def _bind_lengths(self, count: int, logits: int) -> None:
        if self._shape == (count, logits):
            return
        self._token_ids = np.zeros((1, count), np.int64)
        self._slot_ids = np.zeros((1, count), np.int64)
        self._logits = np.empty((1, logits, self._vocab), np.float32)
        self._bind(io.TOKEN_IDS, self._token_ids)
        self._bind(io.SLOT_IDS, self._slot_ids)
        logits_value = ort.OrtValue.ortvalue_from_numpy(self._logits)
        self._binding.bind_ortvalue_output(io.LOGITS, logits_value)
        self._bound[io.LOGITS] = logits_value
        self._shape = (count, logits)

    def _bind(self, name: str, array: npt.NDArray[Any]) -> ort.OrtValue:
        """Bind an array by reference: what is written to it later is what the graph reads."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_input(name, value)
        self._bound[name] = value
        return value


def _open_session(bundle: Bundle, threads: int, providers: list[str]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOG_FATAL_ONLY
    # The arena would keep what the longest prompt chunk once needed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Threads spin between the operators of a step, and stop when the step is done.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    missing = [name for name in providers if name not in ort.get_available_providers()]
    if not missing:
        path = bundle.file(BACKBONE)
        try:
            session = ort.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # see OrtContext.run
            reason = str(error).splitlines()[0]
            raise BackendError(
                f"{path}: onnxruntime {ort.__version__} cannot load this backbone ({reason}); run "
                "stem-edge verify, or export again"
            ) from error
        # onnxruntime falls back to the CPU without an error when a provider cannot start.
        missing = [name for name in providers if name not in session.get_providers()]
    if missing:
        raise BackendError(
            f"onnxruntime {ort.__version__} cannot use {', '.join(missing)}; available here: "
            f"{', '.join(ort.get_available_providers())}"
        )
    return session


def _row_inputs(cache: RowCache) -> dict[str, ort.OrtValue]:
    """The slots of the row cache as graph inputs, by reference."""
    layout = cache.layout
    arrays: dict[str, npt.NDArray[Any]] = {}
    for index, layer in enumerate(layout.layers):
        arrays[f"{io.ROW_CODES}{layer}"] = cache.codes[index]
        if layout.quantized:
            arrays[f"{io.ROW_SCALES}{layer}"] = cache.scales[index]
    if layout.quantized:
        arrays[io.ROW_ZERO_POINTS] = layout.zero_points(cache.slots)
    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}

"""The backbone on onnxruntime: a session for each graph, over memory that is bound once.

Hidden states, KV cache, rows and logits lie where the graphs compute: in the memory of a device, or
of this process. A step takes ids, slots and lengths, a few bytes a token, and returns the logits of
the tokens asked for, or from a device only the largest of them. On the CPU nothing is copied.
Arrays sized by the number of tokens are bound again when that changes, which it does not while
decoding. On the CPU, layers with a window keep no more than that needs (kv_window.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.kv import CACHES, KvType
from stem_edge.graph.names import Variant
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import (
    BackendBatch,
    BackendContext,
    Resumes,
    check_logits,
)
from stem_edge.runtime.backends.onnxruntime.device_memory import DeviceArray, DeviceMemory
from stem_edge.runtime.backends.onnxruntime.device_slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.kv_window import KvWindow
from stem_edge.runtime.backends.onnxruntime.portable_backend import PortableContext
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
    open_session,
)
from stem_edge.runtime.backends.onnxruntime.rope_arrays import RopeArrays
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.backends.step_costs import SIZES
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.memory import return_freed_memory

# A step of no more, as when guesses are verified, leaves too little behind to look for.
FEW_TOKENS = max(SIZES)
from_numpy = ort.OrtValue.ortvalue_from_numpy


class OrtBackend:
    """Sessions by the names of their graphs: those for the CPU, or a variant of them.

    memory: of the provider, for all but the weights. kv: type of keys and values in the graphs;
    default: that of the activations. Raises BackendError, OutOfMemoryError.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: Slots | None,
        threads: int,
        providers: Sequence[Provider],
        memory: DeviceMemory | None = None,
        variant: Variant | None = None,
        kv: KvType | None = None,
    ) -> None:
        if slots is not None and not isinstance(slots, (ArraySlots, DeviceSlots)):
            raise BackendError(
                "onnxruntime cannot read these slots; make them with this loader's make_slots"
            )
        self.config, self.slots, self.variant = config, slots, variant
        self.dtype = np.dtype(np.float16 if variant == "fp16" else np.float32)  # of activations
        self.kv = CACHES[kv or ("fp16" if variant == "fp16" else "fp32")]
        self.memory = memory or DeviceMemory(CPU)
        self.on_cpu = all(provider.on_cpu for provider in providers)
        self._ropes: RopeArrays | None = None
        self.sessions: dict[str, ort.InferenceSession] = {}
        for name, graph in graphs.items():
            if name != io.ROWS:  # belongs to the slots, which run it
                self.sessions[name] = open_session(graph, threads, providers)
                return_freed_memory()  # otherwise what packing freed stays with this process

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens, with all memory that it will need.

        Raises OutOfMemoryError.
        """
        if self.variant == "portable" and not isinstance(self.slots, DeviceSlots):
            return PortableContext(self.config, self.sessions, self.slots, length)
        self.memory.collect()
        return OrtContext(self, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch."""
        return PlainBatch()

    def ropes(self, length: int) -> RopeArrays:
        """Return the rotations for a context; another one's if they suffice, else longer ones."""
        if self._ropes is None or self._ropes.length < length:
            self._ropes = RopeArrays(self.config, self.memory, self.dtype, length)
        return self._ropes

    def close(self) -> None:
        """Release the sessions, and slots on a device."""
        self._ropes = None
        self.sessions.clear()
        if isinstance(self.slots, DeviceSlots):
            self.slots.close()
        self.memory.collect()
        return_freed_memory()


class OrtContext:
    """KV cache and hidden states of one generation.

    After it is dropped, the next call to the backend frees its memory on a device.
    """

    def __init__(self, backend: OrtBackend, length: int) -> None:
        self._memory, self._config, self.length = backend.memory, backend.config, length
        self._dtype, self._cache = backend.dtype, backend.kv
        self._windowed = backend.variant is None  # only the graphs for the CPU are
        self._kv: list[DeviceArray] = []
        self._graphs = {
            name: BoundSession(session, in_place=backend.on_cpu)
            for name, session in backend.sessions.items()
        }
        self._position, self._filled = 0, 0  # of the current step; tokens computed so far
        self._step = (0, False)  # tokens of the bound hidden states, True for the prefill graph
        self._lengths = {prefix: _Lengths() for prefix in ("", io.WINDOW)}
        if isinstance(backend.slots, DeviceSlots):
            self._bind(backend.slots.inputs())
        elif backend.slots is not None:
            self._bind({name: from_numpy(rows) for name, rows in backend.slots.inputs().items()})
        self._bind_fixed()
        self._ropes = backend.ropes(length)
        self._bind(self._ropes.values())
        self._output = _Output(self._graphs, backend)

    def __del__(self) -> None:
        self._memory.retire((self._graphs, self._kv))  # not freed here: this may be any thread

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes so far; on a device, all of it from the beginning."""
        if self._memory.kind == "device":
            return sum(array.nbytes for array in self._kv)
        return self.nbytes_of(self._filled)

    def nbytes_of(self, tokens: int) -> int:
        shapes = ((array, array.shape[2]) for array in self._kv)
        return sum(a.nbytes // rows * min(rows, tokens) for a, rows in shapes)

    @property
    def earliest(self) -> int:
        return self._window.earliest

    def resumes(self, tokens: int) -> Resumes:
        """Go on by pairs, unless rounding follows from the tokens of a step or a window drops some.

        It does with experts, which compute their tokens together, and in attention over float16.

        Nowhere on a device or with its graphs, where memory is taken at once.
        """
        if not self._windowed:
            return ""
        dropped = self.settled or tokens > self._window.capacity
        half = self._cache.dtype == np.float16
        return "steps" if dropped or half or self._config.n_experts else "pairs"

    @property
    def settled(self) -> int:
        return self._window.settled

    def rest(self) -> None:
        if self._step[0] > 1:
            self._bind_hidden(1, prefill=False)

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return views [heads, tokens, width]."""
        if self.earliest or any(array.shape[2] < tokens for array in self._kv):
            return []
        return [array.host[0, :, :tokens] for array in self._kv]

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        for view, array in zip(self.kept(tokens), arrays, strict=True):
            view[...] = array
        self._filled = max(self._filled, tokens)

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        count, total = len(token_ids), position + len(token_ids)
        self._memory.collect()
        first = self._window.make_room(position, count)
        self._position, self._filled = position, max(self._filled, total)
        self._ropes.fill(total)
        step = (count, prefill and io.PREFILL in self._graphs)
        if max(count, self._step[0]) > FEW_TOKENS:
            return_freed_memory()  # otherwise a prompt chunk's activations stay with this process
        if step != self._step:
            self._bind_hidden(*step)
        self._token_ids[0] = token_ids
        self._positions[0] = np.arange(position, total)
        self._lengths[""].write(total)
        self._lengths[io.WINDOW].write(total - first)
        for name in self._before_rows:
            self._run(name)

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Complete a step; only a device gives no more than the `top` largest logits."""
        self._slot_ids[0] = slot_ids
        for name in self._after_rows:
            self._run(name)
        if not logits:
            return np.empty((0, self._config.vocab_size), np.float32)
        return self._output.logits(len(slot_ids), logits, top, self._position)

    def _run(self, name: str) -> None:
        with onnxruntime_errors(f"for the backbone ({name}) at position {self._position}"):
            self._graphs[name].run()

    def _bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        for graph in self._graphs.values():
            graph.bind(values)

    def _feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for graph in self._graphs.values():
            graph.feed(arrays)

    def _bind_fixed(self) -> None:
        """Bind what never changes; the KV cache first, so that lack of memory shows at once."""
        config, length = self._config, self.length
        windows = list[npt.NDArray[Any]]()
        for number in range(config.own_kv_layers):
            layer = config.layer(number)
            rows = io.kv_capacity(layer.window, length) if self._windowed else length
            shape = (1, layer.n_kv_heads, rows, self._cache.width(layer))
            for name in (io.KEYS, io.VALUES):
                array = self._memory.empty(
                    shape, np.dtype(self._cache.dtype), f"the KV cache of {length:,} tokens"
                )
                self._kv.append(array)
                windows += [array.host] if rows < length else []
                self._bind({f"{name}{number}": array.value()})
                # Those that borrow it, too: kernels of quantized caches demand outputs of each.
                users = [n for n in range(config.n_layers) if config.layer(n).kv_layer == number]
                self._bind({f"{io.NEW}{name}{user}": array.value() for user in users})
        for prefix, lengths in self._lengths.items():
            self._feed(lengths.inputs(prefix))
        self._window = KvWindow(windows, config.sliding_window)

    def _bind_hidden(self, count: int, prefill: bool) -> None:
        """Bind hidden states of `count` tokens, an array for each graph's output."""
        layers = [io.PREFILL] if prefill else [n for n in (io.EARLY, io.LATE) if n in self._graphs]
        names = [io.EMBED, *layers]
        shape, what = (
            (1, count, self._config.hidden_width),
            f"the hidden states of {count:,} tokens",
        )
        # Allocate all before binding any, so that nothing has changed if memory runs out.
        values = [self._memory.empty(shape, self._dtype, what).value() for _ in names]
        self._step = (0, False)
        self._output.forget()
        last = io.REST if io.REST in self._graphs else io.HEAD
        for name, value, following in zip(names, values, [*names[1:], last], strict=True):
            self._graphs[name].bind({io.NEW + io.HIDDEN: value})
            self._graphs[following].bind({io.HIDDEN: value})
        if last == io.REST:
            self._graphs[last].bind({io.EMBEDDED: values[0]})
        self._token_ids, self._slot_ids, self._positions = np.zeros((3, 1, count), np.int64)
        self._feed({io.TOKEN_IDS: self._token_ids, io.SLOT_IDS: self._slot_ids})
        self._feed({io.POSITIONS: self._positions})
        self._before_rows = [name for name in names if name in (io.EMBED, io.EARLY)]
        self._after_rows = names[len(self._before_rows) :]
        self._step = (count, prefill)


class _Lengths:
    """Inputs that say how many rows of the KV cache are filled, those of the step included."""

    def __init__(self) -> None:
        self._seqlens_k, self._total = np.zeros(1, np.int32), np.zeros((), np.int32)

    def inputs(self, prefix: str) -> dict[str, npt.NDArray[np.int32]]:
        return {prefix + io.SEQLENS_K: self._seqlens_k, prefix + io.TOTAL_LENGTH: self._total}

    def write(self, rows: int) -> None:
        self._seqlens_k[0], self._total[...] = rows - 1, rows


class _Output:
    """Layers for the wanted positions only, the head, and the logits that it brings to the host."""

    def __init__(self, graphs: Mapping[str, BoundSession], backend: OrtBackend) -> None:
        self._head, self._top = graphs[io.HEAD], graphs.get(io.TOP)
        self._rest = graphs.get(io.REST)
        self._memory, self._vocab_size = backend.memory, backend.config.vocab_size
        self._width, self._dtype = backend.config.hidden_width, backend.dtype
        self._bound: tuple[int, int] | None = None  # tokens, and how many of their largest logits
        self._logits: F32 = np.empty((1, 0, 0), np.float32)
        self._set = np.zeros((0, 0), np.int64)  # ids whose logits are not -inf

    def forget(self) -> None:
        """Bind again before the next run, because the hidden states are other arrays."""
        self._bound = None

    def logits(self, count: int, wanted: int, top: int, position: int) -> F32:
        """Return logits [wanted, V] of the last of `count` tokens from this position on."""
        if self._top is None or top >= self._vocab_size:
            top = 0
        if self._bound != (wanted, top):
            self._bind(count, wanted, top)
        with onnxruntime_errors(f"for the backbone ({io.HEAD}) at position {position}"):
            if self._rest is not None:
                self._rest.run()
            self._head.run()
            if self._top is not None and top:
                self._top.run()
        logits: F32 = self._logits[0]
        first = position + count - wanted
        if not top:
            return check_logits(logits, first)
        check_logits(self._largest[0], first)
        np.put_along_axis(logits, self._set, -np.inf, 1)
        self._set = self._ids[0].copy()
        np.put_along_axis(logits, self._set, self._largest[0], 1)
        return logits

    def _bind(self, count: int, wanted: int, top: int) -> None:
        self._bound = None  # so that the next step binds anew if memory runs out here
        shape = (1, wanted, self._vocab_size)
        places = np.arange(count - wanted, count, dtype=np.int64)
        if self._rest is not None:
            hidden = self._memory.empty(
                (1, wanted, self._width), self._dtype, "hidden states"
            ).value()
            self._rest.bind({io.WANTED: from_numpy(places), io.NEW + io.HIDDEN: hidden})
            self._head.bind({io.HIDDEN: hidden})
            places = np.arange(wanted)  # all, because `rest` computes no others
        self._head.bind({io.WANTED: from_numpy(places)})
        if self._top is None or not top:
            self._logits = np.empty(shape, np.float32)
            self._head.bind({io.LOGITS: from_numpy(self._logits)})
        else:
            on_device = self._memory.empty(shape, np.float32, "logits").value()
            self._head.bind({io.LOGITS: on_device})
            self._largest = np.empty((1, wanted, top), np.float32)
            self._ids = np.empty((1, wanted, top), np.int64)
            host = {
                io.TOP_LOGITS: self._largest,
                io.TOP_IDS: self._ids,
                io.COUNT: np.array([top], np.int64),
            }
            self._top.bind({io.LOGITS: on_device} | {n: from_numpy(a) for n, a in host.items()})
            self._logits = np.full(shape, -np.inf, np.float32)
            self._set = np.zeros((wanted, 0), np.int64)
        self._bound = wanted, top

"""A loaded backbone: its graphs as sessions, and its RoPE tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.graph import names as io
from stem_edge.graph.kv import Cache
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_tables
from stem_edge.runtime.backends.costs import LESS_MEMORY
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, open_session
from stem_edge.system.memory import (
    KEPT_NBYTES,
    give_back_freed_blocks,
    own_pages,
    return_freed_memory,
)

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.prepared.streaming import WeightStream
    from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider

# Graph name -> its file, or its bytes.
Graphs: TypeAlias = Mapping[str, Path | GraphSource]
Sessions: TypeAlias = dict[str, ort.InferenceSession]
# Numbers of tokens in a matrix product that round each token alike: any, only even ones, or unknown. If "even",
# an empty sequence is added to a step of one token. Unless "any", one is added to a batch of an odd number, too.
Rows: TypeAlias = Literal["any", "even", ""]
from_numpy = ort.OrtValue.ortvalue_from_numpy
ROPE_BLOCK = 1024  # positions that are computed at once
PACKED_NBYTES = 16 << 20  # smaller freed blocks are reused in packing; larger matrices are few
# Smaller freed blocks are reused after loading, such as most activations of a small model's prompt. With KEPT_NBYTES,
# new pages took 8 % of its time; this takes 27 MB more during the prompt (SmolLM2-135M-Instruct, 512 tokens).
PROMPT_NBYTES = 1 << 20


class RopeArrays:
    """RoPE tables as graph inputs, for positions below `length`. Raises OutOfMemoryError."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config, self.length = config, length
        self.filled = 0  # number of positions whose rotations are computed
        self._arrays = {
            name: empty((length, table.shape[1]), np.float32, "the RoPE tables")
            for name, table in padded_ropes(config, 0).items()
        }

    def values(self) -> Mapping[str, ort.OrtValue]:
        return {name: from_numpy(array) for name, array in self._arrays.items()}

    def fill(self, positions: int) -> None:
        """Compute the tables for the first `positions` positions, except positions computed before."""
        while self.filled < min(positions, self.length):
            start, stop = self.filled, min(self.filled + ROPE_BLOCK, self.length)
            for name, table in padded_ropes(self._config, stop, start).items():
                self._arrays[name][start:stop] = table
            self.filled = stop


def padded_ropes(config: ModelConfig, positions: int, start: int = 0) -> dict[str, F32]:
    """Return graph input name -> RoPE table [positions - start, head_width / 2], zero-padded."""
    tables: dict[str, F32] = {}
    for layer in map(config.layer, range(config.n_layers)):
        names = io.rope_names(config, layer)
        if names[0] not in tables:
            padding = ((0, 0), (0, (io.head_width(layer) - layer.head_dim) // 2))
            found = rope_tables(layer.rope, positions, start)
            tables |= dict(zip(names, (np.pad(one, padding) for one in found), strict=True))
    return tables


class LaterSessions:
    """Sessions of optional graphs, which only save time; each group of graphs is opened at first use.

    groups: group name -> graphs that are opened together. opener: function that opens a group.
    """

    def __init__(self, groups: dict[str, Graphs], opener: Callable[[Graphs], Sessions]) -> None:
        self._groups, self._opener = groups, opener
        self._open, self._failed = dict[str, Sessions](), dict[str, str]()

    def find(self, group: str) -> Sessions:
        """Return the sessions of one of the `groups` of graphs; empty if there is no such group.

        Opening is tried once. If it fails, this warns once, and raises BackendError at every call.
        """
        if group in self._failed:
            raise BackendError(self._failed[group])
        if group not in self._open and group in self._groups:
            try:
                self._open[group] = self._opener(self._groups[group])
            except (BackendError, OutOfMemoryError) as error:
                self._failed[group] = str(error)
                told = f"{error}; answers take longer, and more memory"
                warnings.warn(told, RuntimeWarning, stacklevel=2)
                raise BackendError(str(error)) from error
        return self._open.get(group, {})

    def clear(self) -> None:
        self._groups.clear()
        self._open.clear()


@dataclass(frozen=True)
class Loaded:
    """The sessions of a loaded backbone, the row cache slots and the settings of its steps."""

    config: ModelConfig
    sessions: Sessions
    slots: Mapping[str, ort.OrtValue]  # row cache, by the names of graph inputs; empty if dense
    kv: Cache  # how keys and values are stored
    later: LaterSessions
    rows: Rows
    stream: WeightStream | None = None  # of weights that exceed the memory

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.later.clear()
        self.sessions.clear()
        return_freed_memory()


def open_sessions(
    graphs: Graphs,
    threads: int,
    provider: Provider | None = None,
    *,
    whole_steps: bool = False,
    as_built: bool = False,
    sparing: bool = False,
) -> Sessions:
    """Open the graphs of a backbone; see open_session. Raises BackendError, OutOfMemoryError.

    sparing: take less memory (42 instead of 142 MB for a 1B model), but a third more time, because
    the pages of one packed matrix are not reused for the next.
    """
    give_back_freed_blocks(KEPT_NBYTES if sparing else PACKED_NBYTES)
    sessions = Sessions()
    try:
        for name, graph in graphs.items():
            sessions[name] = open_session(
                graph, threads, provider, whole_steps=whole_steps, as_built=as_built
            )
    finally:
        give_back_freed_blocks(KEPT_NBYTES if sparing else PROMPT_NBYTES)
        return_freed_memory()
    return sessions


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Return zeros, whose memory is committed as it is written. Raises OutOfMemoryError, which names `what`."""
    try:
        return own_pages(shape, np.dtype(dtype).type)
    except (MemoryError, OSError) as error:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise OutOfMemoryError(
            f"no memory left for {what}: needs {nbytes:,} bytes ({error}); {LESS_MEMORY}"
        ) from error

"""A loaded backbone: its graphs as sessions, and the rotations of RoPE.

Cosines and sines are computed as far as a context has come, and the system provides their pages then.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from stem_edge.runtime.backends.interface import LESS_MEMORY
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider, ort
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, open_session
from stem_edge.system.memory import (
    KEPT_NBYTES,
    give_back_freed_blocks,
    own_pages,
    return_freed_memory,
)

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.prepared.streaming import WeightStream

# By the names of the graphs.
Graphs: TypeAlias = Mapping[str, Path | GraphSource]
Sessions: TypeAlias = dict[str, ort.InferenceSession]
# Numbers of rows with which products round a row alike: any, only even ones, or not known. With "even", a
# step of one token has an empty sequence beside it; unless it is "any", so has a batch of an odd number.
Rows: TypeAlias = Literal["any", "even", ""]
from_numpy = ort.OrtValue.ortvalue_from_numpy
ROPE_BLOCK = 1024  # positions that are computed at once
PACKED_NBYTES = 16 << 20  # larger matrices are few


class RopeArrays:
    """Graph inputs with the rotations of positions up to `length`. Raises OutOfMemoryError."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config, self.length = config, length
        self.filled = 0  # positions whose rotations are computed
        self._arrays = {
            name: empty((length, table.shape[1]), np.float32, "the RoPE tables")
            for name, table in padded_ropes(config, 0).items()
        }

    def values(self) -> Mapping[str, ort.OrtValue]:
        """Return the inputs, [length, head_width / 2] each."""
        return {name: from_numpy(array) for name, array in self._arrays.items()}

    def fill(self, positions: int) -> None:
        """Compute the rotations of the first positions, as far as that has not been done."""
        while self.filled < min(positions, self.length):
            start, stop = self.filled, min(self.filled + ROPE_BLOCK, self.length)
            for name, table in padded_ropes(self._config, stop, start).items():
                self._arrays[name][start:stop] = table
            self.filled = stop


def padded_ropes(config: ModelConfig, positions: int, start: int = 0) -> dict[str, F32]:
    """Return graph input -> RoPE table, [positions - start, head_width / 2], padded with zeros."""
    tables: dict[str, F32] = {}
    for layer in map(config.layer, range(config.n_layers)):
        names = io.rope_names(config, layer)
        if names[0] not in tables:
            padding = ((0, 0), (0, (io.head_width(layer) - layer.head_dim) // 2))
            found = rope_tables(layer.rope, positions, start)
            tables |= dict(zip(names, (np.pad(one, padding) for one in found), strict=True))
    return tables


class NotOpened(RuntimeWarning):
    """A graph that only saves time cannot be opened."""


class LaterSessions:
    """Sessions of graphs that only save time, opened when one of a group is first needed.

    groups: graphs that are opened together, by a name for all of them. opener: opens them.
    """

    def __init__(
        self,
        groups: Mapping[str, Graphs] | None = None,
        opener: Callable[[Graphs], Sessions] = dict,
    ) -> None:
        self._groups, self._opener = dict(groups or {}), opener
        self._open, self._failed = dict[str, Sessions](), dict[str, str]()

    def find(self, name: str) -> Sessions:
        """Return the sessions of a group, none if there is no such group.

        Raises BackendError; opening is tried once, and a failure is warned of then.
        """
        if name in self._failed:
            raise BackendError(self._failed[name])
        if name not in self._open and name in self._groups:
            try:
                self._open[name] = self._opener(self._groups[name])
            except (BackendError, OutOfMemoryError) as error:
                self._failed[name] = str(error)
                warnings.warn(NotOpened(f"{error}; answers take longer without it"), stacklevel=2)
                raise BackendError(str(error)) from error
        return self._open.get(name, {})

    def clear(self) -> None:
        """Release them; none is opened any more."""
        self._groups.clear()
        self._open.clear()


@dataclass(frozen=True)
class Loaded:
    """The sessions of a backbone, and what its steps read."""

    config: ModelConfig
    sessions: Sessions
    slots: Mapping[str, ort.OrtValue]  # row cache, by the names of graph inputs; empty if dense
    kv: Cache  # of keys and values
    later: LaterSessions = field(default_factory=LaterSessions)
    stream: WeightStream | None = None  # of weights that exceed the memory
    rows: Rows = ""

    def close(self) -> None:
        """Release the sessions."""
        if self.stream is not None:
            self.stream.close()
        self.later.clear()
        self.sessions.clear()
        return_freed_memory()


def open_sessions(
    graphs: Graphs,
    threads: int,
    providers: Sequence[Provider],
    *,
    whole_steps: bool = False,
    as_built: bool = False,
    sparing: bool = False,
) -> Sessions:
    """Open the graphs of a backbone; see open_session. Raises BackendError, OutOfMemoryError.

    sparing: take less memory, and a third more time. Each matrix is packed, also to compare it with a prepared
    one. Usually, the pages of a freed one are kept for the next: 142 MB of a 1B model, 42 if sparing.
    """
    give_back_freed_blocks(KEPT_NBYTES if sparing else PACKED_NBYTES)
    sessions = Sessions()
    try:
        for name, graph in graphs.items():
            sessions[name] = open_session(
                graph, threads, providers, whole_steps=whole_steps, as_built=as_built
            )
    finally:
        give_back_freed_blocks()
        return_freed_memory()
    return sessions


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Return zeros in memory that the system provides as it is written. Raises OutOfMemoryError."""
    try:
        return own_pages(shape, np.dtype(dtype).type)
    except (MemoryError, OSError) as error:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise OutOfMemoryError(
            f"no memory left for {what}: needs {nbytes:,} bytes ({error}); {LESS_MEMORY}"
        ) from error

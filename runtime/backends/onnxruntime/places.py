"""Shared KV cache arrays in which contexts lie side by side, so that one step can decode all of them.

A step binds a part of the arrays and copies nothing. It reads each matrix once for all its sequences.
"""

from __future__ import annotations

from stem_edge.runtime.backends.interface import BackendPlaces
from stem_edge.runtime.backends.onnxruntime.context import KvArrays, OrtContext, Place
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded


class OrtPlaces(BackendPlaces):
    """KV memory for `size` contexts of `length` tokens that decode together; see BackendPlaces."""

    def __init__(self, loaded: Loaded, size: int, length: int) -> None:
        self._kv = KvArrays(loaded, size, length, pads=loaded.rows != "any")
        self._contexts: list[OrtContext] = []  # ordered by place

    def join(self, context: OrtContext, tokens: int) -> None:
        context.move(Place(self._kv, len(self._contexts)), tokens)
        self._contexts.append(context)
        self._kv.taken = len(self._contexts)

    def leave(self, place: int, tokens: int) -> None:
        context = self._contexts[place]
        context.move(Place(context.own), tokens)
        last = self._contexts.pop()
        self._kv.taken = len(self._contexts)
        if last is not context:
            last.move(Place(self._kv, place), last.filled)
            self._contexts[place] = last

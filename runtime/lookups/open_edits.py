"""Holds the edits of `with model.edited()` blocks that are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stem_edge.config import ModelConfig
from stem_edge.runtime.lookups.overlay import Overlay
from stem_edge.runtime.text.codec import TextCodec

if TYPE_CHECKING:
    from stem_edge.bundle.edit_files.file import Edit


class OpenEdits:
    """The edits of all running `with model.edited()` blocks, in order. All threads share them."""

    def __init__(self, text: TextCodec, config: ModelConfig) -> None:
        self._text, self._config = text, config
        self._entries: dict[object, tuple[Edit, ...]] = {}  # keyed: a thread removes only its own
        self._latest: Overlay | None = None

    @contextmanager
    def added(self, edits: tuple[Edit, ...]) -> Iterator[None]:
        """Add edits until the `with` block ends. Raises InputError if they cannot be applied."""
        Overlay(self._text, self._config, edits)  # refuse them here rather than at the first call
        key = object()
        self._entries[key] = edits
        try:
            yield
        finally:
            del self._entries[key]

    @property
    def all(self) -> tuple[Edit, ...]:
        """The edits of all running `edited()` blocks, oldest first. A call that begins now applies all of them."""
        return tuple(edit for entry in list(self._entries.values()) for edit in entry)

    def overlay(self) -> Overlay | None:
        """Return which rows tokens look up in all running `edited()` blocks; None without edits."""
        if not (edits := self.all):
            return None
        latest = self._latest  # another thread may replace it
        if latest is None or edits != latest.edits:
            latest = self._latest = Overlay(self._text, self._config, edits)
        return latest

"""Edits of `with model.edited()` blocks that are running, and rows that a call names itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stem_edge.config import ModelConfig
from stem_edge.runtime.lookups.lookups import Changes, Lookups, StemId
from stem_edge.runtime.lookups.overlay import Overlay, given_lookups
from stem_edge.runtime.text.codec import TextCodec

if TYPE_CHECKING:
    from stem_edge.bundle.edit_files.file import Edit
    from stem_edge.runtime.engine import Engine


class OpenEdits:
    """The edits of all `with model.edited()` blocks that are running, in order. For all threads."""

    def __init__(self, engine: Engine, text: TextCodec, config: ModelConfig) -> None:
        self._engine, self._text, self._config = engine, text, config
        self._entries: dict[object, tuple[Edit, ...]] = {}  # keyed: a thread removes only its own
        self._latest: tuple[tuple[Edit, ...], Changes] = ((), Changes())

    @contextmanager
    def added(self, edits: tuple[Edit, ...]) -> Iterator[None]:
        """Add edits while a block runs. Raises InputError for edits that cannot be applied."""
        Overlay(self._text, self._config, edits)  # refuse them here rather than at the first call
        key = object()
        self._entries[key] = edits
        try:
            yield
        finally:
            del self._entries[key]

    @property
    def all(self) -> tuple[Edit, ...]:
        """The edits of a call that begins now, in order of application."""
        return tuple(edit for entry in list(self._entries.values()) for edit in entry)

    def now(self) -> Changes:
        """Return the edits of a call that begins now, resolved to lookups."""
        edits, (known, changes) = self.all, self._latest
        if edits != known:
            changes = Overlay(self._text, self._config, edits)
            self._latest = edits, changes
        return changes

    def lookups(
        self,
        prompt: list[int],
        stem_ids: Sequence[StemId] | None,
        changes: Changes | None = None,
    ) -> Lookups:
        """Return the lookups of a call, by default with the current edits. Raises InputError."""
        given = None
        if stem_ids is not None:
            given = given_lookups(self._config, stem_ids, len(prompt))
        return Lookups(self._engine, changes or self.now(), prompt, given)

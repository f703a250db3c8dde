"""Streaming detokenizer: returns text once later tokens can no longer change it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec

if TYPE_CHECKING:
    from stem_edge.runtime.text.stops import StopTexts

CHARACTER = 4  # most tokens of one character: each has a byte of it at least


class TokenStream:
    """Converts tokens to text one at a time: `push` returns final text, `finish` the rest.

    It holds back unfinished characters and any ending that may become a stop text. A stop text, and
    anything after it, is not returned.

    silent: ids to leave out of the text. Special tokens are left out, too, if skip_special_tokens is True.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        silent: Collection[int] = (),
    ) -> None:
        self._stops, self._silent = _stops(stop), silent
        self._decode = partial(codec.decode, skip_special_tokens=skip_special_tokens)
        self._leaves_out = partial(codec.is_silent, skip_special_tokens=skip_special_tokens)
        # Ids to decode before those that wait, because decoders may treat the first id of a text
        # differently (sentencepiece drops its leading space), and the count of their characters.
        self._before, self._given = list[int](), 0
        self._waiting = list[int]()  # ids whose text is not certain yet

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the text; None before that."""
        return None if self._stops is None else self._stops.found

    def push(self, token_id: int) -> str:
        """Add one token; return new final text, often empty."""
        if token_id in self._silent:
            return ""
        text = self._decode([*self._before, *self._waiting, token_id])
        grown, unfinished = len(text) > self._given, text.endswith(REPLACEMENT)
        if unfinished or not grown:
            if not self._leaves_out(token_id):
                self._waiting.append(token_id)
            if not grown or len(self._waiting) <= 2 * CHARACTER:
                return ""
        new = text[self._given : len(text) - unfinished]
        if unfinished:
            # The bytes before the last character can no longer become characters. Keep the tokens that show
            # this, and the tokens of the last character.
            self._before, self._waiting = [], self._waiting[:CHARACTER] + self._waiting[-CHARACTER:]
            self._given = len(self._decode(self._waiting)) - 1
        else:
            if len(self._before) != 1:  # one token that has text of its own: it serves from then on
                self._before = [*self._waiting, token_id]
                self._given = len(self._decode(self._before))
            self._waiting = []
        return new if self._stops is None else self._stops.push(new)

    def finish(self) -> str:
        rest = self._decode([*self._before, *self._waiting])[self._given :]
        return rest if self._stops is None else self._stops.push(rest) + self._stops.finish()


def _stops(stop: Sequence[str]) -> StopTexts | None:
    if not stop:
        return None
    from stem_edge.runtime.text.stops import StopTexts

    return StopTexts(stop)

"""Streaming detokenizer: returns text once later tokens can no longer change it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec

CHARACTER = 4  # most tokens of one character: each has a byte of it at least


class TokenStream:
    """Converts tokens to text one at a time: `push` returns final text, `finish` the rest.

    It holds back unfinished characters and any ending that may become a stop text. Once a stop text
    is complete, `stopped` is True, and neither that text nor anything after it is returned. If several
    stop texts end at the same character, the longest counts.

    silent: ids that are left out of the text; special tokens are left out by default.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        silent: Collection[int] = (),
    ) -> None:
        self._stop, self._silent = tuple(stop), silent
        self._decode = partial(codec.decode, skip_special_tokens=skip_special_tokens)
        self._leaves_out = partial(codec.is_silent, skip_special_tokens=skip_special_tokens)
        # Ids to decode before those that wait, because decoders may treat the first id of a text
        # differently (sentencepiece drops its leading space), and the count of their characters.
        self._before, self._given = list[int](), 0
        self._waiting = list[int]()  # ids whose text is not certain yet
        self._held = ""  # decoded text that may begin a stop text
        self.stopped = False
        self.stop_text: str | None = None  # the stop text that ended it

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
            # The bytes before the last character are no characters, whatever comes. Keep enough tokens to know
            # so, and those of the last character.
            self._before, self._waiting = [], self._waiting[:CHARACTER] + self._waiting[-CHARACTER:]
            self._given = len(self._decode(self._waiting)) - 1
        else:
            if len(self._before) != 1:  # one token that has text of its own: it serves from then on
                self._before = [*self._waiting, token_id]
                self._given = len(self._decode(self._before))
            self._waiting = []
        return self._release(new) if self._stop else new

    def finish(self) -> str:
        """Return the remaining text, after the last token."""
        rest = self._decode([*self._before, *self._waiting])[self._given :]
        text = self._release(rest)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        """Append `text`; return the part that is final, and hold back the rest."""
        if self.stopped:
            return ""
        text = self._held + text
        # (end, start): the stop text that is complete first wins, so that the result does not depend
        # on how the text was split into tokens.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self.stop_text = True, text[start:end]
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0

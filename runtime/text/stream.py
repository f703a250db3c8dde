"""Text of tokens as they come, given out once it is certain: a character or a stop text can be split over tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec

CHARACTER = 4  # most tokens of one character: each has a byte of it at least


class TokenStream:
    """Token ids in, text out: `push` returns text that is certain, `finish` the rest.

    It holds back unfinished characters and any ending that may become a stop text. Once a stop text
    is complete, `stopped` is True, and neither that text nor anything after it is returned. Of stop
    texts that are complete at the same character, the longest counts.

    silent: ids that are left out of the text, as are the names of special tokens by default.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        silent: Collection[int] = (),
    ) -> None:
        self._codec, self._stop = codec, tuple(stop)
        self._skip, self._silent = skip_special_tokens, silent
        self._ids: list[int] = []  # ids decoded last, then ids not decoded yet
        self._pending = 0  # count of ids not decoded yet, at the end of self._ids
        self._given = (
            0  # count of characters of the text of self._ids that have been decoded before
        )
        self._held = ""  # decoded text that may begin a stop text
        self.stopped = False
        self.stop_text: str | None = None  # which ended it

    def push(self, token_id: int) -> str:
        """Take one token; return new text, often empty."""
        if token_id in self._silent or self._codec.is_silent(
            token_id, skip_special_tokens=self._skip
        ):
            return ""
        self._ids.append(token_id)
        self._pending += 1
        return self._release(self._decode(last=False))

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        text = self._release(self._decode(last=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode(self, last: bool) -> str:
        """Text of the ids not decoded yet, without a last character that may change, unless they are the last ids.

        They are decoded after the ids before them, because decoders may treat the first id of a text
        differently (sentencepiece drops its leading space).
        """
        text = self._text()
        unfinished = text.endswith(REPLACEMENT) and not last
        if len(text) <= self._given or (unfinished and self._pending <= 2 * CHARACTER):
            return ""
        new = text[self._given : len(text) - unfinished]
        if unfinished:
            # The bytes before the last character are no characters, whatever comes. Keep enough tokens to know
            # so, and those of the last character.
            pending = self._ids[-self._pending :]
            self._ids = pending[:CHARACTER] + pending[-CHARACTER:]
        else:
            self._ids = self._ids[-self._pending :]
        self._pending = len(self._ids) if unfinished else 0
        self._given = len(self._text()) - unfinished
        return new

    def _text(self) -> str:
        return self._codec.decode(self._ids, skip_special_tokens=self._skip)

    def _release(self, text: str) -> str:
        """Return the part of the held text and `text` that is certain; hold the rest."""
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
    """Length of the longest ending of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0

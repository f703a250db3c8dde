"""Text of tokens as they come, given out once it is certain: a character or a stop text can be split over tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec


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
        self._decoded = 0  # count of decoded ids at the start of self._ids
        self._held = ""  # decoded text that may begin a stop text
        self.stopped = False
        self.stop_text: str | None = None  # which ended it

    def push(self, token_id: int) -> str:
        """Take one token; return new text, often empty."""
        if token_id in self._silent:
            return ""
        self._ids.append(token_id)
        return self._release(self._decode(last=False))

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        text = self._release(self._decode(last=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode(self, last: bool) -> str:
        """Text of the ids not decoded yet; empty while its end may change, unless they are the last.

        They are decoded after the ids before them, because decoders may treat the first id of a text
        differently (sentencepiece drops its leading space).
        """
        skip = self._skip
        before = self._codec.decode(self._ids[: self._decoded], skip_special_tokens=skip)
        text = self._codec.decode(self._ids, skip_special_tokens=skip)
        unfinished = text.endswith(REPLACEMENT) and not last
        if unfinished or len(text) <= len(before):
            return ""
        self._ids, self._decoded = self._ids[self._decoded :], len(self._ids) - self._decoded
        return text[len(before) :]

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

"""Text to tokens and back: tokenizer.json, read by the tokenizers library.

Streaming is the hard part: a character can be cut over several tokens, and a stop text as well.
TokenStream turns ids into text that never has to be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from stem_edge.errors import BundleError, InputError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """The tokenizer of a bundle. Raises BundleError when its file is damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library panics with a class that is no Exception
            raise BundleError(
                f"{path}: not a tokenizer.json ({error}); export the bundle again"
            ) from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects around it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
            raise InputError(f"the text is not valid Unicode ({error}); give it as UTF-8") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


class TokenStream:
    """Token ids in, text out: `push` returns what is certain, `finish` what is left.

    Holds back unfinished characters and any ending that may become a stop text. Once a stop text
    is complete (the first to be; of several the longest), `stopped` is True, and neither it nor
    anything after it is returned.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, tuple(stop)
        self._ids: list[int] = []  # the last decoded ids, then those that are not decoded yet
        self._decoded = 0  # how many of self._ids are decoded
        self._held = ""  # decoded, but maybe the beginning of a stop text
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one token; returns new text, often empty."""
        self._ids.append(token_id)
        return self._release(self._decode(last=False))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._release(self._decode(last=True))
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode(self, last: bool) -> str:
        """Text of the ids not decoded yet; unless it is the last, none while its end may change.

        Decoded together with the ids before them, because a decoder may treat the first id of a
        text in its own way (sentencepiece drops its leading space).
        """
        before = self._codec.decode(self._ids[: self._decoded])
        text = self._codec.decode(self._ids)
        unfinished = text.endswith(REPLACEMENT) and not last
        if unfinished or len(text) <= len(before):
            return ""
        self._ids, self._decoded = self._ids[self._decoded :], len(self._ids) - self._decoded
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """What of the held text and `text` can go out."""
        if self.stopped:
            return ""
        text = self._held + text
        # (end, start): the text that is complete first wins, so that it is no matter how the text
        # was cut into tokens.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0

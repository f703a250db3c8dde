"""Text to token ids and back, with tokenizer.json and the tokenizers library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import NamedTuple, TypeVar

import msgspec
from tokenizers import Tokenizer

from stem_edge.errors import InputError
from stem_edge.runtime.text.kept import open_kept
from stem_edge.shown import format_size, one_line
from stem_edge.system.memory import own_memory, return_freed_memory

T = TypeVar("T")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes of memory to tokenize one byte of text, and one byte that the tokenizer's steps may make of it. The
# largest measurements for byte-level and sentencepiece tokenizers, with tokenizers 0.23.
TEXT_NBYTES, GROWN_NBYTES = 480, 66
MAX_GROWN = 1 << 28  # bytes that a text may grow to inside the tokenizer
SPECIAL_IN_PROMPT = "a prompt names special tokens, which are ordinary text in it; chat_prompt makes a prompt of messages, stem-edge run chats"
LEAST_LONGEST = 64  # bytes to allow each token, because one may stand for a whole unknown word


class ChatPrompt(str):
    """A rendered chat template. Tokenizing converts the names of special tokens in it to tokens."""

    __slots__ = ()


class TextRoom(NamedTuple):
    """Bytes for tokenizing a text: `planned` is reserved; more must fit this process's `limit`."""

    planned: int
    limit: int


class TextCodec:
    """The tokenizer of a bundle. Raises BundleError when its file is damaged.

    vocab_size: size of the model's vocabulary; all ids in the file must be below it.
    limit: most bytes of memory of this process while the tokenizer loads. Raises MemoryPlanError.
    kept: path of the tokenizer cache file (kept.py). If it is missing, a child process writes it,
    so that all loads take the same memory.
    """

    room: TextRoom | None = None  # None: no limit

    def __init__(
        self,
        path: Path,
        vocab_size: int | None = None,
        limit: int | None = None,
        kept: Path | None = None,
    ) -> None:
        self._path, self._lock, self._busy = path, RLock(), False
        self._kept = None if kept is None else open_kept(kept)
        if self._kept is None and kept is not None:
            from stem_edge.runtime.text.keeping_child import keep_by_child  # at a first load

            keep_by_child(path, vocab_size, kept, limit)
            self._kept = open_kept(kept)
        if self._kept is not None:
            self._checked = self._kept.checked
        else:
            from stem_edge.runtime.text.keeping import read_checked  # unless cached

            checked, self._tokenizer = read_checked(path, vocab_size, limit)
            self._checked = msgspec.structs.replace(checked, json=b"")
            del checked  # its JSON is as large as the file
        return_freed_memory()  # since the library frees half of what it took

    @property
    def nbytes_to_come(self) -> int:
        """Most bytes of memory that the unloaded parts of the tokenizer may take later."""
        return self._checked.memory.kept if self._kept is not None else 0

    def read_whole(self, limit: int) -> None:
        """Read the rest of the tokenizer. Raises MemoryPlanError if this process would exceed `limit` bytes."""
        if self._kept is not None:
            self._checked.memory.check(self._path, limit)
            self._tokenizer, self._kept = self._kept.whole(), None
            return_freed_memory()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of special tokens, such as the markers around chat messages."""
        return self._checked.special_tokens

    def special_in(self, text: str) -> str | None:
        """Return the first special token whose name is in a text; None if there is none."""
        tokens = () if self._special_starts.isdisjoint(text) else self.special_tokens
        return next((token for token in tokens if token in text), None)

    @cached_property
    def _special_starts(self) -> set[str]:
        return {token[:1] for token in self.special_tokens}  # few, while tokens can be thousands

    def special_ids(self, others: Collection[str]) -> set[int]:
        """Return the ids of all special tokens whose names are not in `others`."""
        names = (name for name in self.special_tokens if name not in others)
        tokenizer = self._for_ids(())
        return {id_ for id_ in map(tokenizer.token_to_id, names) if id_ is not None}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, special_tokens_in_text: bool = True
    ) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model expects around it.

        special_tokens_in_text: convert names of special tokens in the text to these tokens.
        Raises InputError for a text that the tokenizer cannot encode.
        """
        if isinstance(text, ChatPrompt):
            add_special_tokens, special_tokens_in_text = False, True
        nbytes = len(_utf8(text))
        if nbytes * self._checked.growth > MAX_GROWN:
            raise InputError(
                f"the text has {nbytes:,} bytes, and {self._path} may turn each byte into "
                f"{self._checked.growth}; give at most {MAX_GROWN // self._checked.growth:,} bytes"
            )
        self._check_room(nbytes)

        def run() -> list[int]:
            kept, named = self._kept, special_tokens_in_text
            tokenizer = self._tokenizer if kept is None else kept.for_text(text, named)
            tokenizer.encode_special_tokens = not special_tokens_in_text
            ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids

        return self._native(run, "this text")

    def _check_room(self, nbytes: int) -> None:
        """Raise InputError if tokenizing a text of `nbytes` might exceed the free memory."""
        taken = nbytes * max(TEXT_NBYTES, GROWN_NBYTES * self._checked.growth)
        if self.room is None or taken <= self.room.planned:
            return
        left = max(0, self.room.limit - own_memory())
        if taken > left:
            raise InputError(
                f"the text has {nbytes:,} bytes, which may take {format_size(taken, up=True)} on their "
                f"way to tokens, but {format_size(left)} of {format_size(self.room.limit)} are left; "
                "shorten it, give token ids, or load with more memory"
            )

    def encode_prompt(self, text: str, context_length: int, max_context: int) -> list[int]:
        """Return the token ids of a prompt. Names of special tokens in it are ordinary text.

        Raises InputError, before tokenizing, for a text that cannot fit context_length tokens.
        max_context: largest context_length of the model, for the error message.
        """
        # Refused, because an empty text would be the begin token alone: surely a mistake.
        if not text:
            raise InputError("the prompt is empty; give some text, or token ids")
        nbytes, longest = len(_utf8(text)), max(self._checked.longest_nbytes, LEAST_LONGEST)
        if nbytes > context_length * longest:
            raise InputError(
                f"the prompt has {nbytes:,} bytes, but a context of {context_length} tokens of up to "
                f"{longest} bytes holds at most {context_length * longest:,}; "
                f"{shorten(context_length, max_context)}"
            )
        if not isinstance(text, ChatPrompt) and self.special_in(text):
            warnings.warn(SPECIAL_IN_PROMPT, stacklevel=5)
        return self.encode(text, special_tokens_in_text=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        ids, skip = list(token_ids), skip_special_tokens
        return self._native(lambda: str(self._for_ids(ids).decode(ids, skip)), "these token ids")

    def is_silent(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """True if a token never adds text: a skipped special token, or an id without a token."""
        silent = self._name(token_id) is None
        return silent or (skip_special_tokens and self._added.get(token_id, False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character.

        The bytes of a special token are its name. Ids without a token, which pad a vocabulary, have no bytes.
        """
        return self._bytes_of(token_id, self._name(token_id))

    def every_token(self, vocab_size: int) -> list[bytes]:
        whole = self._in_turn(lambda: self._tokenizer if self._kept is None else self._kept.whole())
        return [self._bytes_of(id_, whole.id_to_token(id_)) for id_ in range(vocab_size)]

    def _name(self, token_id: int) -> str | None:
        return self._in_turn(lambda: self._for_ids((token_id,)).id_to_token(token_id))

    def _bytes_of(self, token_id: int, text: str | None) -> bytes:
        if text is None:
            return b""
        if token_id in self._added:
            return bytes(text.encode())
        from stem_edge.runtime.text.token_bytes import bytes_of  # for grammars and logprobs

        return bytes_of(text, byte_level=self._checked.byte_level)

    @cached_property
    def _added(self) -> Mapping[int, bool]:
        """Added token id -> True if the token is special. Cached, because reading it is slow."""
        tokens = self._for_ids(()).get_added_tokens_decoder()
        return {token_id: token.special for token_id, token in tokens.items()}

    def _in_turn(self, call: Callable[[], T]) -> T:
        """Run `call` with exclusive use of the tokenizer. Raises InputError in a signal handler that interrupts it."""
        with self._lock:
            if self._busy:
                raise InputError("a signal handler cannot use the tokenizer mid-call; return first")
            try:
                self._busy = True
                return call()
            finally:
                self._busy = False

    def _native(self, call: Callable[[], T], what: str) -> T:
        """Run `call` in turn. Its errors and panics become InputError. what: name of the text in the message."""
        try:
            return self._in_turn(call)
        except (InputError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            if str(error).startswith(KeyboardInterrupt.__name__):  # came in a call back to Python
                raise KeyboardInterrupt from None
            module = type(error).__module__  # others are those of signal handlers
            if module not in ("builtins", "pyo3_runtime") or isinstance(error, OSError):
                raise
            raise InputError(
                f"{self._path}: the tokenizer cannot process {what} ({one_line(error)}); give another "
                "input, or check the bundle with stem-edge verify"
            ) from None

    def _for_ids(self, ids: Sequence[int]) -> Tokenizer:
        return self._tokenizer if self._kept is None else self._kept.for_ids(ids)


def shorten(context_length: int, max_context: int) -> str:
    """Return advice for a prompt above context_length tokens. max_context: limit of the model."""
    if context_length == max_context:
        return "shorten it: this model takes no longer context"
    return f"shorten it or load with a larger context_length (up to {max_context})"


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"the text is of type {type(text).__name__}; give a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # such as bytes of a command line that are not UTF-8
        raise InputError(f"the text is not valid Unicode ({error}); give it as UTF-8") from None

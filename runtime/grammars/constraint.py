"""What an answer may be, token by token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.grammars.gbnf import lark_of
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.grammars.lark import with_prepared_schemas
from stem_edge.runtime.grammars.library import library, one_reason
from stem_edge.runtime.grammars.schema import OPTIONS, place_named, prepared
from stem_edge.runtime.grammars.vocabulary import guided_tokenizer
from stem_edge.runtime.text.codec import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
MAX_COMPILED = 32  # grammars kept, some MB each
MAX_SYMBOLS = 100_000  # of a grammar: more take seconds to compile
# [256, 8]: for each byte of a mask, what is the most that the logits of its 8 tokens may be.
_MOST = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)


class Grammars:
    """Compiled grammars of one bundle. Any thread may use it.

    eos_ids: tokens that end an answer. vocab_size: rows of the model, at least the tokenizer's tokens.
    """

    def __init__(self, codec: TextCodec, eos_ids: Collection[int], vocab_size: int) -> None:
        self._codec, self._eos_ids, self._vocab_size = codec, eos_ids, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def open(self, grammar: Grammar) -> Constraint:
        """Return the constraint of a new answer, which begins with the first token generated.

        Raises InputError without llguidance, and for a grammar that it does not support, that is
        malformed, that no text matches, or that would take too long.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _guarded(self._guided, "the tokenizer")
            tokenizer, compiled = self._tokenizer, self._compiled.pop(grammar, None)
        if compiled is None:  # others need not wait for it
            compiled = _guarded(lambda: _compile(grammar, tokenizer), grammar.kind)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return Constraint(compiled.deep_copy(), tokenizer.vocab_size)

    def _guided(self) -> LLTokenizer:
        return guided_tokenizer(self._codec.json(), self._eos_ids, self._vocab_size)


class Constraint:
    """What may follow in one answer. Use it in one thread at a time.

    Every method raises InputError once the grammar has become too ambiguous to follow.
    """

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((size + 31) // 32 * 4, np.uint8)
        self._most = np.empty((self._bits.size, 8), np.float32)
        self._address = self._bits.ctypes.data

    def mask(self, logits: F32) -> None:
        """Set the logits [vocabulary] of tokens that may not follow to -inf, in place.

        The tokens that end an answer may follow where the grammar is complete.
        """
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.size)
        self._check()
        # Two passes over tables take 40 us at 128,256 tokens; setting by a bool array takes up to 600.
        np.take(_MOST, self._bits, axis=0, out=self._most, mode="clip")
        np.minimum(logits, self._most.reshape(-1)[: logits.size], out=logits)

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen. Raises InputError for one that may not follow."""
        self._matcher.consume_token(token_id)
        self._check()

    def forced(self, most: int) -> list[int]:
        """Return tokens that must follow, at most `most`; none where there is a choice.

        They split the text that must follow as the tokenizer does. They are not accepted yet.
        """
        tokens = self._matcher.compute_ff_tokens()[:most] if most > 0 and not self.ended else []
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else []

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(
                f"the answer cannot go on by its grammar ({one_reason(self._matcher.get_error())}); "
                "simplify the grammar"
            )


def _compile(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of a text, to copy."""
    module = library()
    limits = module.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
    matcher: LLMatcher = module.LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what makes the first step slow, and may find an error
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    matcher = library().LLMatcher
    match grammar.kind:
        case "json_schema":
            schema = prepared(grammar.text)
            try:
                text = matcher.grammar_from_json_schema(schema, overrides=OPTIONS)
            except ValueError as error:  # nested too deeply
                raise _refusal(grammar, str(error)) from None
        case "regex":
            text = matcher.grammar_from_regex(grammar.text)
        case "gbnf":
            text = matcher.grammar_from_lark(lark_of(grammar.text))
        case "lark":
            text = matcher.grammar_from_lark(with_prepared_schemas(grammar.text))
    return str(text)


def _refusal(grammar: Grammar, reason: str) -> InputError:
    where = place_named(grammar.text, reason) if grammar.kind == "json_schema" else ""
    return InputError(
        f"{grammar.kind}: {one_reason(reason)}{where}; correct it, or write what it means in another way"
    )


def _guarded(call: Callable[[], T], what: str) -> T:
    """Return the result of a call; a panic of the library is not an Exception."""
    try:
        return call()
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InputError(
            f"{what}: cannot be compiled ({one_reason(str(error))}); give another"
        ) from None

"""Compiled grammars, and the constraints that they put on each token of an answer."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.grammars.grammar import MAX_CHARS, Grammar
from stem_edge.runtime.grammars.library import (
    MAX_LARK,
    MAX_REGEX,
    guarded,
    library,
    one_reason,
    panics_refused,
)
from stem_edge.runtime.grammars.schema import OPTIONS, check_lark, prepared
from stem_edge.runtime.grammars.vocabulary import vocabulary_of
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.shown import one_line
from stem_edge.system.memory import return_freed_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Cached grammars, of MAX_CHARS together. A character takes 20 to 360 bytes of memory.
MAX_COMPILED = 32
MAX_SYMBOLS = 20_000  # of a grammar: 100,000 take a minute to compile
LOOKAHEAD = 32  # most forced tokens to compute in one call
MAX_FUEL = 500_000  # to read a grammar's regexes; with llguidance's million, a regex may take 90 MB
_STUCK = "the answer cannot go on by its grammar"
# [256, 8]: for each byte of a mask, an upper bound for the logits of its 8 tokens: inf or -inf.
_MOST = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)


class Grammars:
    """Compiles and caches grammars for one bundle. Thread-safe.

    eos_ids: tokens that end an answer. vocab_size: number of logits, which may exceed the tokenizer's size.
    """

    def __init__(self, codec: TextCodec, eos_ids: Collection[int], vocab_size: int) -> None:
        self._codec, self._eos_ids, self._vocab_size = codec, eos_ids, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock, self._compiling = RLock(), RLock()  # re-entrant, for a signal handler

    def open(self, grammar: Grammar) -> GrammarConstraint:
        """Return a new constraint for one answer. It applies from the first generated token on.

        Raises InputError if llguidance is not installed, or if the grammar is malformed, unsupported,
        matches no text, or would take too long.
        """
        with self._lock:
            if self._vocabulary is None:
                parts = self._codec, self._eos_ids, self._vocab_size
                self._vocabulary = guarded(lambda: vocabulary_of(*parts), "the tokenizer")
            vocabulary, compiled = self._vocabulary, self._compiled.pop(grammar, None)
        if compiled is None:  # one at a time, for the memory; cached grammars need not wait
            with self._compiling:
                compiled = guarded(lambda: _compile(grammar, vocabulary), grammar.kind)
                return_freed_memory()
        with self._lock:
            self._keep(grammar, compiled)
            with panics_refused(f"{grammar.kind}: cannot be used"):
                copy = compiled.deep_copy()
        return GrammarConstraint(copy, vocabulary.vocab_size, lambda: self._forget(grammar))

    def _keep(self, grammar: Grammar, compiled: LLMatcher) -> None:
        """Cache a grammar; evict the least recently used grammars."""
        self._compiled[grammar] = compiled
        while (
            len(self._compiled) > MAX_COMPILED
            or sum(len(each.text) for each in list(self._compiled)) > MAX_CHARS
        ):
            self._compiled.popitem(last=False)

    def _forget(self, grammar: Grammar) -> None:
        """Remove a grammar from the cache, because the states of its parser have grown too large."""
        with self._lock:
            self._compiled.pop(grammar, None)


class GrammarConstraint:
    """Restricts the tokens of one answer to a grammar. Use it in one thread at a time.

    failed: function that is called when the grammar has become too large.
    Every method raises InputError if the grammar has become too ambiguous to follow, or if llguidance panics.
    """

    def __init__(self, matcher: LLMatcher, size: int, failed: Callable[[], None]) -> None:
        self._matcher, self._failed = matcher, failed
        self._bits = np.zeros((size + 31) // 32 * 4, np.uint8)
        self._most = np.empty((self._bits.size, 8), np.float32)
        self._address = self._bits.ctypes.data
        self._forced, self._asked = list[int](), False  # forced tokens, and True if they are known

    def mask(self, logits: F32) -> None:
        """Set logits of forbidden tokens to -inf; a complete grammar allows end tokens, too."""
        with panics_refused(_STUCK):
            self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.size)
            self._check()
        if not self._bits.any():
            raise InputError(
                "no token of this model can follow here by the grammar, because its tokenizer cannot "
                "write the characters; allow others"
            )
        # Two passes over tables take 40 us at 128,256 tokens; setting by a bool array takes up to 600.
        np.take(_MOST, self._bits, axis=0, out=self._most, mode="clip")
        np.minimum(logits, self._most.reshape(-1)[: logits.size], out=logits)

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a chosen token. Raises InputError if the grammar forbids it."""
        with panics_refused(_STUCK):
            self._matcher.consume_token(token_id)
            self._check()
        del self._forced[:1]
        self._asked = bool(self._forced)

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that the grammar forces to come next; [] if there is a choice.

        The tokenizer would split their text into the same tokens. The caller must still `accept` each token.
        """
        if not self._asked and not self.ended:
            with panics_refused(_STUCK):
                tokens = self._matcher.compute_ff_tokens()[:LOOKAHEAD]
                self._forced = tokens[: self._matcher.validate_tokens(tokens)] if tokens else []
        self._asked = True
        return self._forced[:most]

    @property
    def ended(self) -> bool:
        """True if the grammar allows nothing more except the end of the answer."""
        with panics_refused(_STUCK):
            return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._failed()
            raise InputError(
                f"{_STUCK} ({one_reason(self._matcher.get_error())}); simplify the grammar"
            )


def _compile(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile a grammar; return a matcher in its initial state, to be copied for each answer."""
    module = library()
    limits = module.LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, initial_lexer_fuel=MAX_FUEL, verbose_errors=False
    )
    source = _source(grammar)
    matcher: LLMatcher = module.LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # here, because the first mask is slow, and may show an error
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    matcher, text = library().LLMatcher, grammar.text
    match grammar.kind:
        case "json_schema":
            try:
                return str(matcher.grammar_from_json_schema(prepared(text), overrides=OPTIONS))
            except ValueError as error:  # nested too deeply
                raise _refusal(grammar, str(error)) from None
        case "regex":
            if len(text) > MAX_REGEX:
                raise InputError(
                    f"regex has {len(text):,} characters; expected at most {MAX_REGEX:,}"
                )
            return str(matcher.grammar_from_regex(text))
        case "gbnf":
            text = _lark_of(text)
    check_lark(text)
    return str(matcher.grammar_from_lark(text))


def _lark_of(gbnf: str) -> str:
    """Convert a grammar in llama.cpp's format (GBNF) to Lark, with llguidance's converter.

    llguidance splits text into lexemes and takes the longest match; GBNF reads single characters. So a
    grammar may allow fewer texts than in llama.cpp, but never more.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(gbnf) > MAX_LARK:
        raise InputError(f"GBNF has {len(gbnf):,} characters; expected at most {MAX_LARK:,}")
    try:
        return str(gbnf_to_lark(gbnf))
    except Exception as error:  # of several kinds, without a base class
        reason = one_line(re.sub(r" at line \d+,.*", "", str(error), flags=re.DOTALL))
        raise InputError(f"gbnf: {reason}; correct the grammar") from None


def _refusal(grammar: Grammar, reason: str) -> InputError:
    return InputError(
        f"{grammar.kind}: {one_reason(reason)}; correct it, or write what it means in another way"
    )

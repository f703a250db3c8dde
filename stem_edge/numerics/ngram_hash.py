"""Hashes of n-grams: which rows of an n-gram table each position of a text looks up.

The rows depend on token ids alone, so they are known before any layer runs. A table consists of
several *heads*, stored one after another. Each position looks up one row of each head, chosen by a
hash of the last n token ids. The row numbers of a position are its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.description import Description
from stem_edge.errors import InputError
from stem_edge.limits import MAX_MIXED, MAX_ORDER, MAX_RECORDS, MAX_VOCAB
from stem_edge.numerics.quantize import I32, I64


class NgramHash(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Hash function of one n-gram table. Raises ValueError for impossible parameters.

    The table consists of heads, parts with a hash of their own, and an n-gram has a row in each.
    Each id of the n-gram is multiplied by a multiplier. The products are mixed by exclusive or
    (Engram, arXiv 2601.07372) or summed (LongCat, arXiv 2601.21204). The result modulo the head's
    number of rows is the row. filler: id for positions before a text. end: id that ends a document;
    later n-grams do not reach back to it. classes: number of classes that ids are mapped to first.
    """

    vocab_size: int  # token ids are below this
    orders: tuple[int, ...]  # n of each head's n-grams
    sizes: tuple[int, ...]  # rows of each head
    mixing: Literal["xor", "sum"]
    # For each head, a multiplier for each id of its n-gram, newest first.
    multipliers: tuple[tuple[int, ...], ...]
    filler: int
    end: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        heads = len(self.orders)
        if not heads or {len(self.sizes), len(self.multipliers)} != {heads}:
            raise ValueError(
                "each head of a table of n-grams needs an order, a size and multipliers"
            )
        if not 1 < min(self.orders) <= max(self.orders) <= MAX_ORDER:
            longest = max(self.orders)
            raise ValueError(f"n-grams of up to {longest} ids; expected 2 to {MAX_ORDER}")
        if min(self.sizes) < 1 or self.rows > MAX_RECORDS:
            raise ValueError(f"{self.rows} rows; expected 1 to {MAX_RECORDS}, at least 1 a head")
        if not 0 < self.vocab_size <= MAX_VOCAB or not 0 < self.symbols <= self.vocab_size:
            raise ValueError(f"{self.symbols} of {self.vocab_size} ids; expected 1 to {MAX_VOCAB}")
        for order, numbers in zip(self.orders, self.multipliers, strict=True):
            if len(numbers) != order or min(numbers) < 0:
                raise ValueError(f"multipliers {numbers} of an n-gram of {order} ids")
            greatest = max(numbers) if self.mixing == "xor" else sum(numbers)
            if greatest * (self.symbols - 1) >= MAX_MIXED:
                raise ValueError(f"products of {numbers} exceed 64 bits")
        if not 0 <= self.filler < self.vocab_size or not 0 <= (self.end or 0) < self.vocab_size:
            raise ValueError(f"ids {self.filler} and {self.end} are not below {self.vocab_size}")

    @cached_property
    def heads(self) -> int:
        """Number of hash heads; each position looks up one row of each head."""
        return len(self.orders)

    @cached_property
    def rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def symbols(self) -> int:
        """Number of different inputs of the hash: token ids, or classes that ids are mapped to."""
        return self.vocab_size if self.classes is None else self.classes

    @cached_property
    def memory(self) -> int:
        """Number of earlier ids that the hash of a position depends on."""
        return max(self.orders) - 1

    def keys(
        self, ids: npt.ArrayLike, before: npt.ArrayLike = (), class_of: I32 | None = None
    ) -> I64:
        """Return row numbers [T, heads]: each position of `ids` [T] looks up one row of each head.

        before: the ids before `ids`, as many as n-grams reach back; () at the beginning of a text.
        class_of: the class of each id [vocab_size], if the hash has classes. Raises InputError.
        """
        text = np.concatenate([self._checked(before)[-self.memory :], self._checked(ids)])
        past = len(text) - np.size(ids)
        seen = self._seen(text, past, class_of)
        keys = np.empty((len(text) - past, self.heads), np.int64)
        mix = np.bitwise_xor if self.mixing == "xor" else np.add
        for head, (size, numbers) in enumerate(zip(self.sizes, self.multipliers, strict=True)):
            products = [ids * number for ids, number in zip(seen, numbers, strict=False)]
            keys[:, head] = reduce(mix, products) % size
        return keys + np.cumsum([0, *self.sizes[:-1]], dtype=np.int64)

    def _seen(self, text: I64, past: int, class_of: I32 | None) -> list[I64]:
        """Return the ids (or classes) of text[past:], and those 1, 2, ... positions earlier, one array each."""
        at, symbols, filler = np.arange(len(text)), text, self.filler
        if self.classes is not None:
            if class_of is None or class_of.shape != (self.vocab_size,):
                raise InputError(f"this table needs the class of each of its {self.vocab_size} ids")
            symbols, filler = class_of[text].astype(np.int64), int(class_of[filler])
        first = np.zeros(len(text), np.int64)  # start of each position's document
        if self.end is not None:
            ended = np.where(text == self.end, at + 1, 0)
            first[1:] = np.maximum.accumulate(ended)[:-1]
        seen = list[I64]()
        for distance in range(self.memory + 1):
            places = at[past:] - distance
            known = places >= first[past:]
            seen.append(np.where(known, symbols[np.maximum(places, 0)], filler))
        return seen

    def _checked(self, ids: npt.ArrayLike) -> I64:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InputError(f"ids are whole numbers [T]; found {array.dtype} {list(array.shape)}")
        numbers = array.astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            raise InputError(
                f"ids from {numbers.min()} to {numbers.max()}; expected 0 to {self.vocab_size - 1}"
            )
        return numbers


def hash_of(model: Description) -> NgramHash:
    """Return the hash of a model's n-grams; for Engram, with the heads of all Engram layers."""
    sizes, order = model.ngram_sizes, model.ngram_order
    if not model.ngram_multipliers:
        return input_hash(model.vocab_size, order, sizes, model.ngram_end)
    each = len(sizes) // len(model.ngram_multipliers) // (order - 1)
    numbers = [
        of_layer[:length]
        for of_layer in model.ngram_multipliers
        for length in range(2, order + 1)
        for _ in range(each)
    ]
    return NgramHash(
        vocab_size=model.vocab_size,
        orders=tuple(map(len, numbers)),
        sizes=sizes,
        mixing="xor",
        multipliers=tuple(numbers),
        filler=model.ngram_filler,
        end=model.ngram_end,
    )


def input_hash(vocab_size: int, order: int, sizes: Sequence[int], end: int | None) -> NgramHash:
    """Return the hash of LongCat's n-grams, whose rows are averaged with the input embedding.

    order: length of the longest n-grams. sizes: rows of each head, shorter n-grams first. end: end-of-text id.
    """
    each = len(sizes) // (order - 1)
    orders = tuple(length for length in range(2, order + 1) for _ in range(each))
    return NgramHash(
        vocab_size=vocab_size,
        orders=orders,
        sizes=tuple(sizes),
        mixing="sum",
        multipliers=tuple(
            tuple(pow(vocab_size, at, size) for at in range(length))
            for length, size in zip(orders, sizes, strict=True)
        ),
        filler=0,
        end=end,
    )

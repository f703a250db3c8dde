"""Check on a device of steps with many tokens, before they are trusted."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import Backend, NotFiniteError
from stem_edge.runtime.backends.onnxruntime.device.loader import (
    FEW_TOKENS,
    MANY_TOKENS,
    agreeing_tokens,
)
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholders
from stem_edge.runtime.rows.prefetch import ANY_NUMBER
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.rows import make_layout

CONTEXT = 256


class Fake:
    """A backend with other logits in steps of at least some length."""

    def __init__(
        self, wrong_from: int, by: float = 0.03, finite: int = 1000, few_alone: bool = False
    ) -> None:
        self.wrong_from, self.by = wrong_from, by
        self.finite, self.few_alone = finite, few_alone  # positions, and steps, that give numbers
        self.slots: set[int] = set()

    def open_context(self, length: int) -> Fake:
        self.length, self.position = length, 0
        return self

    def begin(self, ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False) -> None:
        assert position == self.position and not prefill
        self.step = len(ids)
        self.position += len(ids)

    def finish(self, slots: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        assert len(slots) == self.step and not top
        self.slots |= set(slots.tolist())
        if self.position > self.finite or (self.few_alone and self.step > FEW_TOKENS):
            raise NotFiniteError("nan")
        wrong = np.zeros((logits, 8), np.float32)
        wrong[-1] = self.by * (self.step >= self.wrong_from)  # of one position alone
        return np.ones((logits, 8), np.float32) + wrong


@pytest.mark.parametrize(
    ("wrong_from", "expected"),
    ((1000, ANY_NUMBER), (MANY_TOKENS, FEW_TOKENS), (FEW_TOKENS + 1, FEW_TOKENS)),
)
def test_steps_that_give_other_logits_are_not_taken(wrong_from: int, expected: int) -> None:
    assert agreeing_tokens(cast(Backend, Fake(wrong_from)), None, CONTEXT) == expected


def test_rounding_is_no_reason() -> None:
    assert agreeing_tokens(cast(Backend, Fake(17, by=0.005)), None, CONTEXT) == ANY_NUMBER


def test_a_short_context_is_tried_whole() -> None:
    backend = Fake(wrong_from=20)
    assert agreeing_tokens(cast(Backend, backend), None, 10) == ANY_NUMBER
    assert backend.length == 10


def test_steps_that_give_no_numbers_are_not_taken() -> None:
    backend = Fake(wrong_from=1000, few_alone=True)
    assert agreeing_tokens(cast(Backend, backend), None, CONTEXT) == FEW_TOKENS


@pytest.mark.parametrize("finite", (0, FEW_TOKENS, MANY_TOKENS - 1))
def test_logits_of_nan_are_reported(finite: int) -> None:
    with pytest.raises(NotFiniteError):
        agreeing_tokens(cast(Backend, Fake(1000, finite=finite)), None, CONTEXT)


@pytest.mark.parametrize("count", (1, 5, 100))
def test_only_slots_that_are_there_are_used_and_they_have_rows(count: int) -> None:
    slots = ArraySlots(make_layout(200, (0, 1), ((64,),), "int8", 32), count)
    backend = Fake(1000)
    agreeing_tokens(cast(Backend, backend), slots, CONTEXT)
    assert backend.slots == set(range(min(count, FEW_TOKENS)))
    used = min(count, FEW_TOKENS)
    assert all(layer[0][:used].any(axis=1).all() for layer in slots.codes)
    assert not any(layer[0][used:].any() for layer in slots.codes)


@pytest.mark.parametrize("context", range(1, 70))
def test_contexts_of_any_length_are_compared(context: int) -> None:
    right, wrong = Fake(1000), Fake(FEW_TOKENS + 1)
    assert agreeing_tokens(cast(Backend, right), None, context) == ANY_NUMBER
    assert right.length <= context
    expected = FEW_TOKENS if context >= 2 * FEW_TOKENS else ANY_NUMBER
    assert agreeing_tokens(cast(Backend, wrong), None, context) == expected


@pytest.mark.parametrize(("width", "count"), [(16, 16), (1 << 20, 12), (1 << 24, 1)])
def test_made_up_rows_are_few_where_records_are_large(width: int, count: int) -> None:
    layout = make_layout(100, (0, 1), ((width,),), "int8", 16)
    assert placeholders(layout) == count

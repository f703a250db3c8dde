"""A toy engine with batches: logits follow from all tokens of a sequence and from its last row.

A step over keys and values of another sequence, or at a wrong position, gives other tokens or fails.
Every step is noted, and a hook may let it fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from loading import load_fixed
from toy_engine import ToyLoader, toy_engine

from stem_edge.bundle.footprint import footprint_of
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.interface import BackendContext
from stem_edge.runtime.backends.memory_plan import Needs, Part
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.model import Model

NOTHING = -1
# What a step computed: tokens, and the position of each (of a prompt: of the first).
Unit = tuple[list[int], list[int]]


class Loader(ToyLoader):
    """Like ToyLoader, with the KV cache of the bundle's model."""

    def needs(self, context: int) -> Needs:
        footprint = footprint_of(self.manifest)
        part = Part(1000, footprint.kv_nbytes(context), 0, 10, 0, footprint.slot_nbytes)
        return Needs(footprint, context, part)

    def open(self, slots: Any) -> Any:
        return Backend(self.manifest.model.vocab_size, slots, footprint_of(self.manifest).kv_nbytes)


class Backend:
    """Opens contexts and batches, and knows all that are alive."""

    def __init__(self, vocab_size: int, slots: Any, nbytes_of: Callable[[int], int]) -> None:
        self.vocab_size, self.slots, self.nbytes_of = vocab_size, slots, nbytes_of
        self.copies = True  # batches that are opened from now on
        self.units: list[Unit] = []
        self.before: Callable[[list[int]], object] = lambda ids: None  # ids: that a step ends with
        self.contexts, self.batches = WeakSet[Context](), WeakSet[ToyBatch]()

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are there."""
        texts = [context.ids for context in self.contexts]
        texts += [ids for batch in self.batches for ids in batch.texts]
        return sum(self.nbytes_of(int((ids != NOTHING).sum())) for ids in texts)

    def open_context(self, length: int) -> Context:
        return Context(self, length)

    def open_batch(self, size: int, length: int) -> Any:
        return ToyBatch(self, size, length) if self.copies else PlainBatch()

    def logits(self, ids: Any, slot: int, end: int) -> Any:
        """Logits [V] after the first `end` ids, of which none may be missing."""
        assert (ids[:end] != NOTHING).all()
        row = self.slots.codes[0][0][slot]
        seed = zlib.crc32(ids[:end].tobytes() + row.tobytes())
        return np.random.default_rng(seed).standard_normal(self.vocab_size, np.float32)

    def close(self) -> None:
        """Nothing to release."""


class Context:
    """Keys and values that are the token ids themselves."""

    earliest = settled = 0

    def __init__(self, backend: Backend, length: int) -> None:
        self.backend, self.length = backend, length
        self.ids = np.full(length, NOTHING, np.int64)
        backend.contexts.add(self)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(int((self.ids != NOTHING).sum()))

    def nbytes_of(self, tokens: int) -> int:
        return self.backend.nbytes_of(tokens)

    def resumes(self, tokens: int) -> str:
        return "pairs"

    def rest(self) -> None:
        """Free nothing."""

    def kept(self, tokens: int) -> list[Any]:
        return [self.ids[:tokens]]

    def restore(self, arrays: Any, tokens: int) -> None:
        self.ids[:tokens] = next(iter(arrays))

    def together(self, position: int) -> int:
        """Let a step have as many tokens as fit."""
        return self.length - position

    def begin(
        self, token_ids: Any, position: int, *, prefill: bool = False, apart: bool = False
    ) -> None:
        self.tokens, self.position = token_ids, position

    def finish(self, slot_ids: Any, logits: int) -> Any:
        end = self.position + len(self.tokens)
        self.backend.before([*self.ids[: self.position].tolist(), *self.tokens.tolist()])
        self.ids[self.position : end] = self.tokens
        self.ids[end:] = NOTHING
        self.backend.units.append((self.tokens.tolist(), [self.position]))
        found = [
            self.backend.logits(self.ids, slot_ids[at - end], at + 1)
            for at in range(end - logits, end)
        ]
        return np.array(found, np.float32).reshape(logits, self.backend.vocab_size)


class ToyBatch:
    """A batch that copies, and gives each sequence that leaves back."""

    copies = True

    def __init__(self, backend: Backend, size: int, length: int) -> None:
        self.backend, self.size, self.length = backend, size, length
        self.texts: list[Any] = []
        backend.batches.add(self)

    def join(self, context: BackendContext, tokens: int) -> None:
        assert isinstance(context, Context) and len(self.texts) < self.size
        text = np.full(self.length, NOTHING, np.int64)
        text[:tokens] = context.ids[:tokens]
        self.texts.append(text)

    def leave(self, place: int) -> None:
        last = self.texts.pop()
        if place < len(self.texts):
            self.texts[place] = last

    def begin(self, first: int, token_ids: Any, positions: Any) -> None:
        assert first + len(token_ids) <= len(self.texts)
        self.step = first, token_ids, positions

    def finish(self, slot_ids: Any) -> Any:
        first, tokens, positions = self.step
        texts = self.texts[first : first + len(tokens)]
        for text, token, position in zip(texts, tokens, positions, strict=True):
            self.backend.before([*text[:position].tolist(), int(token)])
        for text, token, position in zip(texts, tokens, positions, strict=True):
            text[position] = token
        self.backend.units.append((tokens.tolist(), positions.tolist()))
        lines = zip(texts, slot_ids, positions, strict=True)
        return np.array([self.backend.logits(*line[:2], int(line[2]) + 1) for line in lines])


@contextmanager
def toy_model(bundle: Any, *, copies: bool = True, **options: Any) -> Iterator[tuple[Model, Any]]:
    """Load a bundle with this engine; yield the model and its backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "onnxruntime", toy_engine(Loader))
        given: dict[str, Any] = {"warm_start": False} | options
        with load_fixed(bundle, **given) as model:
            backend: Any = model.engine.backend
            backend.copies = copies
            yield model, backend


def check_given_back(model: Model, backend: Any) -> None:
    """Check that no call holds memory, rows or keys and values any more."""
    prefixes = model._prefixes
    prefixes.make_room()
    assert prefixes._taken() == 0 and not prefixes._lent
    assert not backend.batches and len(backend.contexts) == len(prefixes._kept)
    edited = model.engine.rows._edits  # type: ignore[attr-defined]
    assert edited is None or edited.unused().tolist() == sorted(edited._lookups)


def alone(model: Model, prompts: Sequence[Any], **options: Any) -> list[list[int]]:
    """Return the tokens of generate, for each prompt."""
    return [
        [t for chunk in model.generate(prompt, **options) for t in chunk.token_ids]
        for prompt in prompts
    ]


def together(model: Model, prompts: Any, params: Any = None, **options: Any) -> dict[int, Any]:
    """Return the tokens of generate_many by number, or the error of a sequence that failed."""
    found: dict[int, Any] = {}
    for number, chunk in model.generate_many(prompts, params, **options):
        found.setdefault(number, []).extend(chunk.token_ids)
        if chunk.error is not None:
            found[number] = chunk.error
    return found

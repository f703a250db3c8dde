"""Next-token distributions: log probabilities from logits, and divergence between two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stem_edge.numerics.quantize import F32, F64

# Logits converted to float64 at once, which keeps arrays at 8 MB whatever the vocabulary.
PIECE_VALUES = 1 << 20


def log_softmax(logits: F32) -> F64:
    """Return the log probabilities (natural logarithm) [T, V] of logits [T, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def divergence(expected: F32, found: F32) -> F32:
    """Return KL(expected || found) [T] in nats, exact to about 1e-6, of logits [T, V]."""
    step = _positions_at_once(expected.shape[1])
    pieces = [slice(at, at + step) for at in range(0, len(expected), step)]
    return np.concatenate([_divergence(expected[piece], found[piece]) for piece in pieces])


def _divergence(expected: F32, found: F32) -> F32:
    p, q = (logits - logits.max(axis=1, keepdims=True) for logits in (expected, found))
    apart = p - q
    np.exp(p, out=p)
    np.exp(q, out=q)
    total = p.sum(axis=1)
    apart *= p
    nats = apart.sum(axis=1) / total - np.log(total / q.sum(axis=1))
    return np.asarray(nats.clip(min=0), np.float32)  # rounding can make it negative


def side_by_side(streams: Sequence[Iterator[F32]]) -> Iterator[list[F32]]:
    """Yield the models' logits [n, V] of the same n positions; n is limited by memory.

    Use the logits before the next ones, because a model may overwrite them.
    """
    held = [next(stream) for stream in streams]
    most = _positions_at_once(held[0].shape[1])
    while True:
        length = min(most, *map(len, held))
        yield [piece[:length] for piece in held]
        held = [piece[length:] for piece in held]
        for number, stream in enumerate(streams):
            if not len(held[number]):
                following = next(stream, None)
                if following is None:
                    return
                held[number] = following


def _positions_at_once(vocab_size: int) -> int:
    return max(1, PIECE_VALUES // vocab_size)

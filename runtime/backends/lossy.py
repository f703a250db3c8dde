"""Warning that the type of keys and values changes what a model says."""

from __future__ import annotations

import warnings

from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.options import LoadOptions

NOTICEABLE = 0.001


class LossyCache(UserWarning):
    """Keys and values have a type that changes what a model says."""


def tell_of_loss(kv: KvType, engine: str, options: LoadOptions) -> None:
    """Warn if the type of keys and values changes a model noticeably, unless it was asked for.

    4 bits give a warning even then.
    """
    nats = ENGINES[engine].ways.kv_nats.get(kv, 0.0)
    if nats > NOTICEABLE and (options.kv == "auto" or kv == "int4"):
        warnings.warn(
            LossyCache(
                f"keys and values are {kv}, which on {engine} changes what a model says (by {nats:g} nats "
                "in SmolLM2-135M-Instruct); more memory, a shorter context_length or kv='fp16' avoid it"
            ),
            stacklevel=2,
        )

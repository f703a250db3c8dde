"""Warning of keys and values whose type changes what a model says."""

from __future__ import annotations

import warnings

from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.options import LoadOptions

# Divergence in nats that types of keys and values cause in a real model (docs/models.md).
KV_NATS: dict[tuple[str, KvType], float] = {
    ("onnxruntime", "int8"): 0.0025,
    ("onnxruntime", "int4"): 0.22,
    ("ggml", "int8"): 0.0005,
    ("ggml", "int4"): 0.09,
}
NOTICEABLE = 0.001


class LossyCache(UserWarning):
    """Keys and values have a type that changes what a model says."""


def tell_of_loss(kv: KvType, engine: str, options: LoadOptions) -> None:
    """Warn of a type of keys and values that changes a model noticeably, unless it was asked for.

    That of 4 bits is warned of even then.
    """
    nats = KV_NATS.get((engine, kv), 0.0)
    if nats > NOTICEABLE and (options.kv == "auto" or kv == "int4"):
        warnings.warn(
            LossyCache(
                f"keys and values are {kv}, which on {engine} changes what a model says (by {nats:g} nats "
                "in SmolLM2-135M-Instruct); more memory, a shorter context_length or kv='fp16' avoid it"
            ),
            stacklevel=2,
        )

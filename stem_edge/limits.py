"""Limits on the sizes of a model, far above those of any published model.

A damaged or hostile size is refused before an array of this size is allocated.
"""

from __future__ import annotations

MAX_VOCAB = 1 << 24
MAX_RECORDS = 1 << 30  # rows of n-grams are hundreds of millions
MAX_LAYERS = 1 << 8  # twice the deepest, because each costs time and memory before weights do
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_CONTEXT = 1 << 24
MAX_PARAMETERS = 1 << 40  # of the backbone, because its graph gets a node for every few million
MAX_FACTOR = 1 << 16
MAX_KINDS = 8  # of layers, and of tokens that are no text; published models have up to 4
MAX_ROW_WINDOW = 1 << 8  # tokens; the trainer's default is 16
MAX_ROW_EXPERTS = 64  # rows that are mixed
MAX_ORDER = 16  # ids of an n-gram; published models have up to 5
MAX_MIXED = 1 << 63  # products of ids and multipliers, and their sums, must fit into int64
MAX_KERNEL = 16  # tokens that a convolution adds up; published models have 4
MAX_STREAMS = 8  # published models have up to 4
MAX_THETA = 1e15
LEAST_SCALING = 1e-6
MAX_SOFTCAP = 1e6
LEAST_STEP = 1e-20  # of activations on int8

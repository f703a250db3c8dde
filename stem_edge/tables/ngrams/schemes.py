"""N-gram hashes of public models, derived from config.json exactly as in the models' code.

| model | source | tables |
|---|---|---|
| Qwen3.8-Flash-Next | transformers, models/qwen4_exp | bigrams and trigrams, in one layer |
| DeepSeek-V4.1 | the model's reference code | up to 4 ids, each mapped to a class first, in two layers |
| LongCat-Flash-Lite, LongCat-2.0 | the model's modeling_longcat_ngram.py | added to the input embedding |
"""

from __future__ import annotations

from math import isqrt
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from stem_edge.numerics.ngram_hash import NgramHash, input_hash
from stem_edge.tables.ngrams.rows import NgramTable

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Few = Annotated[int, msgspec.Meta(ge=1, le=64)]
Order = Annotated[int, msgspec.Meta(ge=2, le=16)]  # tokens of the longest n-gram
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1 << 16)]
MOST_LAYERS = msgspec.Meta(max_length=64)
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
INT64_MAX = (1 << 63) - 1
WORD = (1 << 64) - 1
LAYER_SEED = 10007  # times the number of a layer: part of its seed
# Multipliers of DeepSeek-V4.1, from the numpy generator with which the model was trained. Other numpy versions
# may generate other numbers.
DEEPSEEK = {
    (99092, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (99092, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


class QwenConfig(msgspec.Struct):
    """Fields about n-gram tables in a Qwen config.json, with the defaults of transformers."""

    vocab_size: Count
    ple_layer_ids: Annotated[list[Count], MOST_LAYERS]  # counted from 1
    ple_embed_dim: Count
    ngram_size: Order
    heads_per_ngram: Few
    ngram_vocab_size_base: Count
    eos_token_id: Id | Annotated[list[Id], msgspec.Meta(min_length=1)]
    seed: int = 1234

    def tables(self) -> list[NgramTable]:
        """Return the model's tables. Raises ValueError if config.json has impossible values."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        orders = _orders(self.ngram_size, self.heads_per_ngram)
        heads, found = len(orders), list[NgramTable]()
        sizes = primes_after(self.ngram_vocab_size_base - 1, heads * len(self.ple_layer_ids))
        for place, layer in enumerate(self.ple_layer_ids):
            numbers = self._multipliers(place)
            keys = NgramHash(
                vocab_size=self.vocab_size,
                orders=orders,
                sizes=sizes[place * heads : (place + 1) * heads],
                mixing="xor",
                multipliers=tuple(numbers[:order] for order in orders),
                filler=ends[0],
                end=ends[0],
            )
            name = f"layer.{layer - 1}"
            found.append(table(name, layer - 1, keys, self.ple_embed_dim // heads))
        return found

    def _multipliers(self, place: int) -> tuple[int, ...]:
        bound, seed = _bound(self.vocab_size), self.seed + LAYER_SEED * place
        words = (splitmix64(seed + GOLDEN * (at + 1)) for at in range(self.ngram_size))
        return tuple(2 * (word % bound) + 1 for word in words)


class DeepSeekConfig(msgspec.Struct):
    vocab_size: Count
    engram_layer_ids: Annotated[list[int], MOST_LAYERS]  # counted from 0
    engram_num_embeddings: list[Count]
    engram_max_ngram_size: Order
    engram_n_heads: Few
    engram_head_dim: Count
    engram_vocab_size: Count
    engram_compressed_vocab_size: Count
    engram_pad_token_id: Id

    def tables(self) -> list[NgramTable]:
        """Return the model's tables. Raises ValueError if their sizes differ from config.json."""
        orders, found = _orders(self.engram_max_ngram_size, self.engram_n_heads), list[NgramTable]()
        heads, layers = len(orders), self.engram_layer_ids
        primes = primes_after(self.engram_vocab_size - 1, heads * len(layers))
        for layer, rows in zip(layers, self.engram_num_embeddings, strict=True):
            sizes, primes = primes[:heads], primes[heads:]
            if sum(sizes) != rows:
                raise ValueError(f"{sum(sizes)} rows of layer {layer}; config.json says {rows}")
            numbers = self._multipliers(layer)
            keys = NgramHash(
                vocab_size=self.vocab_size,
                orders=orders,
                sizes=sizes,
                mixing="xor",
                multipliers=tuple(numbers[:order] for order in orders),
                filler=self.engram_pad_token_id,
                classes=self.engram_compressed_vocab_size,
            )
            found.append(table(f"layer.{layer}", layer, keys, self.engram_head_dim))
        return found

    def _multipliers(self, layer: int) -> tuple[int, ...]:
        classes, order = self.engram_compressed_vocab_size, self.engram_max_ngram_size
        if (known := DEEPSEEK.get((classes, layer))) is not None and len(known) == order:
            return known
        drawn = np.random.default_rng(LAYER_SEED * layer).integers(
            0, _bound(classes), size=order, dtype=np.int64
        )
        return tuple((drawn * 2 + 1).tolist())


class LongCatConfig(msgspec.Struct):
    vocab_size: Count  # of text
    hidden_size: Count
    ngram_vocab_size_ratio: Ratio
    emb_neighbor_num: Order
    emb_split_num: Few
    eos_token_id: Id
    ngram_exclude_sp_token: Literal[False] = False  # True: other tokens end documents, too

    def tables(self) -> list[NgramTable]:
        """Return one table with the rows of all tables of the model; each is a hash head of its own."""
        orders = _orders(self.emb_neighbor_num, self.emb_split_num)
        base = self.ngram_vocab_size_ratio * self.vocab_size
        sizes = tuple(int(base + 2 * head + 1) for head in range(len(orders)))
        keys = input_hash(self.vocab_size, self.emb_neighbor_num, sizes, self.eos_token_id)
        return [table("input", None, keys, self.hidden_size // len(orders))]


# Field of a config.json that shows the kind of its n-gram tables -> how to read it.
SCHEMES: dict[str, type[QwenConfig | DeepSeekConfig | LongCatConfig]] = {
    "ngram_vocab_size_base": QwenConfig,
    "engram_layer_ids": DeepSeekConfig,
    "ngram_vocab_size_ratio": LongCatConfig,
}
# Other name of a field -> its usual name.
ALIASES = {
    "oe_vocab_size_ratio": "ngram_vocab_size_ratio",
    "oe_neighbor_num": "emb_neighbor_num",
    "oe_split_num": "emb_split_num",
    "text_vocab_size": "vocab_size",
    "engram_pad_id": "engram_pad_token_id",
}
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd


def keyed_tables(config: dict[str, Any]) -> list[NgramTable]:
    """Return the n-gram tables that a config.json describes. Raises ValueError if it has none."""
    inner = config.get("text_config")
    config = config | (inner if isinstance(inner, dict) else {})
    config |= {name: config[other] for other, name in ALIASES.items() if other in config}
    for field, scheme in SCHEMES.items():
        if field in config:
            return msgspec.convert(config, scheme).tables()
    raise ValueError(f"no tables of n-grams; expected one of the fields {', '.join(SCHEMES)}")


def table(name: str, layer: int | None, keys: NgramHash, width: int) -> NgramTable:
    """Describe a table of float32 rows, because config.json does not say how rows are stored."""
    return NgramTable(name=name, layer=layer, hash=keys, width=width, stored="fp32")


def splitmix64(number: int) -> int:
    """Return the number after `number` in the generator SplitMix64 (Steele et al., 2014)."""
    number = (number + GOLDEN) & WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


def primes_after(number: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes above `number`, ascending."""
    # On average, every 21st number near 2**30 is a prime, and more of the smaller numbers.
    numbers = np.arange(number + 1, number + 1000 + 32 * count)
    prime = numbers > 1
    for factor in range(2, isqrt(int(numbers[-1])) + 1):
        prime[max(factor * factor - number - 1, -(number + 1) % factor) :: factor] = False
    return tuple(numbers[prime][:count].tolist())


def _bound(n_ids: int) -> int:
    """Return a limit of m such that the multiplier 2m + 1 times any id < n_ids fits in int64."""
    return max(1, INT64_MAX // n_ids // 2)


def _orders(largest: int, heads: int) -> tuple[int, ...]:
    return tuple(order for order in range(2, largest + 1) for _ in range(heads))

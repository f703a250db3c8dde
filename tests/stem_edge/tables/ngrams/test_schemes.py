"""Keys of public models' tables of n-grams, by numbers that their own code and checkpoints give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.numerics.ngram_hash import NgramHash, hash_of
from stem_edge.tables.ngrams.rows import NgramTable, Stored
from stem_edge.tables.ngrams.schemes import keyed_tables
from stem_edge.tables.store import CRC_NBYTES

QWEN: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text", "vocab_size": 248320, "ple_layer_ids": [2],
        "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000, "eos_token_id": [248044, 248046],
    },
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v41", "vocab_size": 129280, "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
    "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 16_000_000,
    "engram_compressed_vocab_size": 99092, "engram_pad_token_id": 2,
}  # fmt: skip
LONGCAT = {
    "model_type": "longcat_flash_ngram", "vocab_size": 131072, "hidden_size": 3072,
    "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4, "eos_token_id": 2,
}  # fmt: skip


def test_qwen() -> None:
    (table,) = keyed_tables(QWEN)
    keys = table.hash
    assert (table.layer, table.width, keys.rows) == (1, 160, 320_001_446)
    assert keys.sizes[:3] == (20000003, 20000023, 20000033) and keys.sizes[-1] == 20000171
    assert keys.multipliers[15] == (23703573157769, 20109073645365, 8052911324071)
    starts = np.concatenate([[0], np.cumsum(keys.sizes)[:-1]])
    found = keys.keys([11, 523, 9001, 44]) - starts
    assert found[0, [0, 1, 8, 9]].tolist() == [13555483, 4877156, 13487508, 12108911]
    assert found[3, [0, 1, 8, 9]].tolist() == [2823642, 15975116, 6900608, 5105745]
    # The same in a model of Qwen3.8-Flash-Next, whose only layer with rows is the second.
    changes = {"vocab_size": keys.vocab_size, "stem_layers": (1,), "ngram_sizes": keys.sizes}
    changes |= {"ngram_multipliers": (keys.multipliers[-1],), "ngram_filler": 248_044}
    settings = models.SIZES | models.ENGRAM | changes | {"ngram_end": 248_044}
    assert hash_of(ModelConfig(**settings)) == keys


def test_deepseek() -> None:
    first, last = keyed_tables(DEEPSEEK)
    assert (first.layer, last.layer, first.width, first.hash.heads) == (1, 14, 256, 24)
    assert first.hash.sizes[:2] == (16000057, 16000079)
    assert not set(first.hash.sizes) & set(last.hash.sizes)
    assert last.hash.multipliers[-1][:2] == (67716810739261, 51510806800915)
    # Derived by numpy's generator, as they were; numpy may change it.
    drawn = np.random.default_rng(10007).integers(0, (2**63 - 1) // 99092 // 2, 4, np.int64)
    assert first.hash.multipliers[-1] == tuple((drawn * 2 + 1).tolist())


def test_longcat() -> None:
    (table,) = keyed_tables(LONGCAT)
    keys = table.hash
    assert (table.layer, table.width) == (None, 256)
    assert (keys.sizes[0], keys.sizes[-1], keys.rows * 256) == (10223617, 10223639, 31_406_985_216)
    starts = np.concatenate([[0], np.cumsum(keys.sizes)[:-1]])
    found = keys.keys([11, 523, 9001, 44]) - starts
    assert found[[0, 1, 3, 3, 3], [0, 0, 0, 4, 11]].tolist() == [
        11,
        1442315,
        4063161,
        1919723,
        8640817,
    ]
    ended = (
        keys.keys([11, 2, 44, 523]) - starts
    )  # id 2 sees what is before it, and later ones do not
    assert ended[[1, 1, 2, 3], [0, 11, 0, 11]].tolist() == [1441794, 1441794, 44, 5767691]


def direct(keys: NgramHash, text: list[int], classes: list[int] | None = None) -> list[list[int]]:
    """Compute keys of a whole text id by id, with Python's numbers."""
    found = list[list[int]]()
    for at in range(len(text)):
        seen = list[int]()
        for distance in range(max(keys.orders)):
            before = text[max(0, at - distance) : at]
            hidden = at < distance or (keys.end is not None and keys.end in before)
            symbol = text[at - distance] if not hidden else keys.filler
            seen.append(classes[symbol] if classes else symbol)
        row = list[int]()
        for head, order in enumerate(keys.orders):
            products = [a * b for a, b in zip(seen, keys.multipliers[head], strict=False)]
            total = products[0]
            for product in products[1:order]:
                total = total ^ product if keys.mixing == "xor" else total + product
            row.append(sum(keys.sizes[:head]) + total % keys.sizes[head])
        found.append(row)
    return found


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK, LONGCAT], ids=["qwen", "deepseek", "longcat"])
def test_keys_of_a_text_with_documents_whole_and_in_pieces(config: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    for table in keyed_tables(config):
        keys = table.hash
        text = random.integers(0, keys.vocab_size, 40)
        text[[7, 8, 20, 31]] = keys.end or 3
        class_of = None
        if keys.classes is not None:
            class_of = random.integers(0, keys.classes, keys.vocab_size, np.int32)
        expected = direct(keys, text.tolist(), None if class_of is None else class_of.tolist())
        assert keys.keys(text, class_of=class_of).tolist() == expected
        pieces = [(0, 1), (1, 2), (2, 9), (9, 9), (9, 22), (22, 40)]
        found = [keys.keys(text[a:b], text[:a], class_of).tolist() for a, b in pieces]
        assert [row for piece in found for row in piece] == expected


def test_damaged_hashes_and_ids_are_refused() -> None:
    good: dict[str, Any] = {
        "vocab_size": 10, "orders": (2,), "sizes": (7,), "mixing": "xor", "multipliers": ((3, 5),),
        "filler": 0,
    }  # fmt: skip
    keys = NgramHash(**good)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"orders": (2, 2)}, "needs an order"),
        ({"orders": (1,)}, "n-grams of"),
        ({"sizes": (0,)}, "rows"),
        ({"multipliers": ((3,),)}, "multipliers"),
        ({"multipliers": ((3, 1 << 62),)}, "64 bits"),
        ({"filler": 10}, "not below"),
        ({"classes": 11}, "of 10 ids"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words):
            NgramHash(**good | change)
    for ids in ([10], [-1], [0.5], [[1]]):
        with pytest.raises(InputError, match="ids"):
            keys.keys(ids)
    with pytest.raises(InputError, match="class of each"):
        NgramHash(**good | {"classes": 4}).keys([1])
    with pytest.raises(ValueError, match="no tables of n-grams"):
        keyed_tables({"model_type": "llama"})
    forged: list[tuple[dict[str, Any], str]] = [
        (LONGCAT | {"ngram_vocab_size_ratio": float("inf")}, "at"),
        (LONGCAT | {"emb_neighbor_num": 1}, ">= 2 - at"),
        (DEEPSEEK | {"engram_num_embeddings": [384006169, 384016682]}, "rows of layer 1"),
        (DEEPSEEK | {"engram_layer_ids": [1] * 65}, "length <= 64"),
        (QWEN | {"text_config": QWEN["text_config"] | {"ngram_size": 64}}, "<= 16 - at"),
        (QWEN | {"text_config": QWEN["text_config"] | {"eos_token_id": []}}, "length >= 1"),
    ]
    for config, words in forged:
        with pytest.raises(ValueError, match=words):
            keyed_tables(config)


def test_qwen_keys_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    settings: dict[str, Any] = {
        "vocab_size": 97, "ple_embed_dim": 36, "ngram_size": 4, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50, "eos_token_id": 5,
    }  # fmt: skip
    config = SimpleNamespace(**settings, seed=1234, make_ngram_vocab_size_divisible_by=8)
    text = np.random.default_rng(3).integers(0, 12, 60)
    for place, table in enumerate(keyed_tables(settings | {"ple_layer_ids": [1, 3]})):
        module = modeling.Qwen4ExpTextNGramEmbedding(config, 36, 0, place)
        found: list[Any] = []
        module.ngram_embedding.forward = lambda ids, found=found: (found.append(ids), ids)[1]
        module(torch.tensor(text[None]), None)
        assert table.hash.keys(text).tolist() == found[0][0].tolist()


@pytest.mark.parametrize(
    ("width", "stored", "rows", "stride"),
    [(160, "bf16", 12, 4096), (256, "fp8", 15, 4096), (2046, "bf16", 1, 4096), (2048, "bf16", 1, 4100)],
)  # fmt: skip
def test_pages_are_those_of_drives_where_rows_are_small(
    width: int, stored: Stored, rows: int, stride: int
) -> None:
    (keyed,) = keyed_tables(QWEN)
    block = 32 if stored == "fp8" else 0
    table = NgramTable(name="a", layer=1, hash=keyed.hash, width=width, stored=stored, block=block)
    assert (table.rows_per_page, table.page_nbytes + CRC_NBYTES) == (rows, stride)

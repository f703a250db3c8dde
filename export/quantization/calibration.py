"""Reads the calibration text, and runs the checkpoint on it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.quantization.exact_model import exact_logits
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.kv_peaks import kv_peaks
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.numerics.quantize import F32, I64
from stem_edge.text.token_file import read_ids

SHIPPED = Path(__file__).with_name("calibration.txt")  # used when the user gives no text
JUDGED_TOKENS = 512  # last tokens of a text, on which the result is compared
SEQUENCE_TOKENS = 512  # as in typical use; not more, to keep the memory of attention small


def read_token_ids(file: str | Path | None, converted: ExportedTokenizer, vocab_size: int) -> I64:
    """Read the token ids of a calibration file. Raises InputError.

    file: UTF-8 text, or ids as .npy or little-endian .int32; None: the text that stem-edge ships.
    """
    path = SHIPPED if file is None else Path(file)

    @cache  # built once, and not for files of ids
    def tokenizer() -> Tokenizer:
        return Tokenizer.from_str(converted.json)

    def encode(text: str, _: bool) -> list[int]:
        ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
        return ids

    return read_ids(path, encode, vocab_size)


def judged_ids(text_ids: I64, max_context: int) -> list[int]:
    """Return the text's last tokens, on which bundle and checkpoint are compared."""
    ids: list[int] = text_ids[-min(JUDGED_TOKENS, max_context) :].tolist()
    return ids


def sequences(
    text_ids: I64, tokens: int, max_context: int, length: int = SEQUENCE_TOKENS
) -> list[list[int]]:
    """Cut about `tokens` tokens from a text, in separate sequences of at most `length` tokens."""
    if len(text_ids) >= 2 * JUDGED_TOKENS:  # a shorter text is used as a whole
        text_ids = text_ids[:-JUDGED_TOKENS]
    length = min(length, max_context, tokens, len(text_ids))
    count = min(-(-tokens // length), len(text_ids) // length)
    starts = np.linspace(0, len(text_ids) - length, count).astype(int)
    return [text_ids[start : start + length].tolist() for start in starts]


def observe(
    checkpoint: Checkpoint,
    token_ids: list[int],
    texts: Iterable[list[int]] = (),
    threads: int = 1,
) -> tuple[F32, dict[str, F32]]:
    """Run the checkpoint on `token_ids`; return its last hidden states, and peaks of activations.

    texts: more sequences, only for peaks. The hidden states [T, hidden_width] are the input of the head.
    Peaks: name of a matrix input, keys or values -> greatest magnitude of each channel [K] over all tokens.
    """
    peaks, config = dict[str, F32](), checkpoint.config

    def see(name: str, x: F32) -> None:
        found = np.abs(x).max(axis=0)
        peaks[name] = np.maximum(found, peaks.get(name, found))

    states = HiddenStates(checkpoint, [token_ids, *texts], threads)
    lenders = states.tokens[0].lenders
    for tokens in states.tokens:
        tokens.lenders = frozenset(range(config.own_kv_layers))
    for layer in range(config.n_layers):
        if layer == config.own_kv_layers:  # from here on, only `token_ids` are run
            del states.tokens[1:], states.states[1:]
        states.advance(see)
        if layer < config.own_kv_layers:
            peaks |= kv_peaks(config, layer, [tokens.kv[layer] for tokens in states.tokens])
        for tokens in states.tokens:
            if layer not in lenders:
                tokens.kv.pop(layer, None)
    found = states.states[0]
    exact_logits(checkpoint, found[:1])  # raises an error for a broken head
    states.advance(see)
    return found, peaks

"""Computes classes of token ids: tokens of a class differ only in case, accents or space.

DeepSeek-V4.1 looks up n-grams of classes, not of ids. No checkpoint stores the classes. They are computed
from the tokenizer and numbered in the order of ids, as in the model's code (docs/formats.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import normalizers

from stem_edge.errors import CheckpointError
from stem_edge.files import disk
from stem_edge.numerics.quantize import I32
from stem_edge.text.tokenizer_gate import MAX_NBYTES, check_json

REPLACED = "\ufffd"  # decoded text of a token that is only a part of a character
SPACE = "\ue000"  # private-use character that replaces a lone space while ends are stripped
# Normalization after which tokens of one class are equal.
STEPS = [
    normalizers.NFKC(),
    normalizers.NFD(),
    normalizers.StripAccents(),
    normalizers.Lowercase(),
    normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
    normalizers.Replace(tokenizers.Regex(r"^ $"), SPACE),
    normalizers.Strip(),
    normalizers.Replace(SPACE, " "),
]


def token_classes(path: Path, vocab_size: int, classes: int) -> I32:
    """Return the class number of each token id [vocab_size], computed from a tokenizer.json.

    Tokens of one class differ only in case, accents or space. Raises CheckpointError unless the
    number of classes is `classes`.
    """
    try:
        checked = check_json(disk.read_file(path.resolve(), MAX_NBYTES), vocab_size)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot read the tokenizer ({error}); copy it, too"
        ) from error
    tokenizer = tokenizers.Tokenizer.from_buffer(checked.json)
    normalizer, numbers = normalizers.Sequence(STEPS), dict[str, int]()
    class_of = np.empty(vocab_size, np.int32)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if REPLACED in text:
            key = tokenizer.id_to_token(token) or text
        else:
            key = normalizer.normalize_str(text) or text
        class_of[token] = numbers.setdefault(key, len(numbers))
    if len(numbers) != classes:
        raise CheckpointError(
            f"{path}: {len(numbers)} classes of tokens, and config.json says {classes}; the tokenizer "
            "is not the model's: copy it again"
        )
    return class_of

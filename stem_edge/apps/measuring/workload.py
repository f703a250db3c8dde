"""Token ids of a real text, as input for measurements.

Tokens decide which rows are read, and how often: constant or random tokens would mislead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.token_ids import check_text

DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")
PROMPT_TOKENS, NEW_TOKENS = 512, 128
ID_FILES = (".npy", ".int32")
READ_CHARS = 1 << 16


@dataclass(frozen=True)
class Workload:
    """A prompt, and the next tokens of the same text, which the model gets one by one."""

    prompt: list[int]
    following: list[int]
    source: str  # describes where the tokens come from

    @property
    def tokens(self) -> int:
        """Number of tokens that the context must have room for."""
        return len(self.prompt) + len(self.following)


def make_workload(
    bundle: Bundle,
    text: str | Path | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    context_length: int | None = None,
) -> Workload:
    """Return a prompt and the tokens after it, from the file `text` (see read_ids), or from the package's own text.

    Default: a prompt of 512 tokens, and 128 new ones; fewer, in about this ratio, if the context or
    the text is too short. If one number is given, the other is its default, reduced to what fits.
    Raises InputError if the numbers do not fit.
    """
    path = DEFAULT_TEXT if text is None else Path(text)
    ids = read_ids(path, bundle)
    context = bundle.manifest.model.max_context if context_length is None else context_length
    prompt, new = _split(min(context, len(ids)), prompt_tokens, new_tokens)
    if prompt < 1 or new < 1 or prompt + new > min(context, len(ids)):
        raise InputError(
            f"{prompt} prompt tokens and {new} new ones are asked for; expected at least 1 of each, "
            f"and together no more than the {len(ids)} tokens of {path} and the {context} of the "
            "context: ask for fewer, or give a longer text"
        )
    source = "the text inside this package" if text is None else str(text)
    return Workload(ids[:prompt], ids[prompt : prompt + new], source)


def _split(room: int, prompt: int | None, new: int | None) -> tuple[int, int]:
    """Return numbers of prompt and new tokens; None: the default, or as many as `room` holds."""
    if prompt is None and new is None:
        new = max(1, min(NEW_TOKENS, room // 5))
    if prompt is None:
        prompt = max(1, min(PROMPT_TOKENS, room - (new or 0)))
    return prompt, max(1, min(NEW_TOKENS, room - prompt)) if new is None else new


def read_ids(path: Path, bundle: Bundle) -> list[int]:
    """Return token ids of a UTF-8 text, or from .npy or little-endian .int32. Raises InputError."""
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:  # not np.load, because it would open archives and pickles
                ids = np.lib.format.read_array(file, allow_pickle=False)
        elif path.suffix == ".int32":
            ids = np.frombuffer(path.read_bytes(), "<i4")
        else:
            ids = np.array(_encode(path, bundle), np.int64)
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give a text or ids") from error
    except ValueError as error:
        raise InputError(
            f"{path}: neither a text in UTF-8 nor token ids in {' or '.join(ID_FILES)} ({error})"
        ) from error
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise InputError(f"{path}: no token ids found; expected a flat list of integers, or a text")
    vocab_size = bundle.manifest.model.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InputError(
            f"{path}: ids from {ids.min()} to {ids.max()}, the bundle has 0 to {vocab_size - 1}; "
            "they belong to another tokenizer"
        )
    found: list[int] = ids.tolist()
    check_text(bundle.manifest.model, found, f"{path}: ")
    return found


def _encode(path: Path, bundle: Bundle) -> list[int]:
    from stem_edge.runtime.text.codec import TextCodec

    codec, ids = TextCodec(bundle.file(TOKENIZER)), list[int]()
    with path.open(encoding="utf-8") as file:
        # In pieces of whole lines, because a tokenizer needs a hundred bytes a character.
        while lines := file.readlines(READ_CHARS):
            ids += codec.encode("".join(lines), add_special_tokens=not ids)
    return ids

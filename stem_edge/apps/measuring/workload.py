"""Token ids of a real text, as input for measurements.

Tokens decide which rows are read, and how often: constant or random tokens would mislead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.token_ids import check_text
from stem_edge.text.token_file import read_ids

DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")
PROMPT_TOKENS, NEW_TOKENS = 512, 128


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
    """Return a prompt and the tokens after it, from a file of text or ids, or from the package's own text.

    Default: a prompt of 512 tokens, and 128 new ones; fewer, in about this ratio, if the context or
    the text is too short. If one number is given, the other is its default, reduced to what fits.
    Raises InputError if the numbers do not fit.
    """
    path = DEFAULT_TEXT if text is None else Path(text)
    ids = _read_ids(path, bundle)
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


def _read_ids(path: Path, bundle: Bundle) -> list[int]:
    """Return the token ids of a text, or of a file of ids. Raises InputError."""
    model, codec = bundle.manifest.model, TextCodec(bundle.file(TOKENIZER))

    def encode(text: str, first: bool) -> list[int]:
        return codec.encode(text, add_special_tokens=first)

    found: list[int] = read_ids(path, encode, model.vocab_size).tolist()
    check_text(model, found, f"{path}: ")
    return found

"""Speculation on four kinds of text: how much faster than without, and how many guesses were right.

The model follows answers that a good model would give, and computes and guesses as it would if they
were its own: random weights say nothing that could be guessed, and different models would not be
measured on the same text. So acceptance is that of these texts, and times are those of the model's shape.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.cases import (
    PLAIN,
    RATE,
    STEP,
    CaseResult,
    Cases,
    Figures,
    Results,
    Run,
    Seen,
    Spread,
    gathered,
    quotients,
)
from stem_edge.measuring.bench.together import FollowedText
from stem_edge.measuring.bench.workers import WorkerProcess
from stem_edge.measuring.workload import DEFAULT_TEXT, NEW_TOKENS, make_workload, source_of
from stem_edge.runtime.text.codec import TextCodec

FOLDER = Path(__file__).with_name("texts")
TOLD = 3  # paragraphs of the default text that are the prompt of "prose"
KINDS = ("copying", "code", "chat", "prose")
MARK = re.compile(r"^### (?:prompt|answer)\n", re.MULTILINE)
# Vocabularies from here on have words as tokens. Of one that has bytes instead, as random weights do,
# ids from FIRST_WORD on stand for words.
WORDS_FROM, FIRST_WORD = 1 << 15, 1 << 10
PIECE = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")
# Kind of subject -> ways of decoding, and how many tokens are guessed at a time. Bundles guess as they
# were loaded; 2 tokens are what llama-cpp-python advises on processors, 10 its default.
WAYS = {
    "stem-edge": {PLAIN: 0, "speculation": 1},
    "llama.cpp": {PLAIN: 0, "2 guesses": 2, "10 guesses": 10},
}


def speculation(
    bundle: Bundle,
    text: str | Path | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    context_length: int | None,
) -> Cases[Seen]:
    """Return a case for each kind of text, with and without guesses.

    text: a file of one kind instead of the four. prompt_tokens, new_tokens: of each task (default:
    whole prompts, 128). Raises InputError.
    """
    tasks = read_tasks(bundle, text, prompt_tokens, new_tokens, context_length)
    every = [each for kind in tasks.values() for each in kind]
    return Cases(
        {kind: _begin(each) for kind, each in tasks.items()},
        _sum_up,
        source="four kinds of text inside this package" if text is None else source_of(text),
        prompt_tokens=max(len(each.prompt) for each in every),
        new_tokens=max(len(each.answer) for each in every),
        tokens=max(len(each.prompt) + len(each.answer) for each in every),
    )


def _begin(tasks: Sequence[FollowedText]) -> Callable[[], Run[Seen]]:
    """Return what each subject runs in each round: all tasks of a kind, in each of its ways."""

    def run(worker: WorkerProcess) -> dict[str, Seen]:
        found = dict[str, Seen]()
        for way, drafts in WAYS[worker.subject.kind].items():
            answers = [worker.guess(task, drafts) for task in tasks]
            counts = [len(task.answer) for task in tasks]
            found[way] = _joined(counts, [Seen(each.figures, each.own) for each in answers])
        return found

    return lambda: run


def _joined(counts: Sequence[int], answers: Sequence[Seen]) -> Seen:
    """Add up the answers of a kind of text."""
    tokens = sum(counts) - len(counts)  # without the first of each, which comes from the prompt
    seconds, drafted, accepted = (
        sum(answer.figures[name] for answer in answers)
        for name in ("seconds", "drafted", "accepted")
    )
    figures: Figures = {RATE: tokens / seconds, "drafted_per_token": drafted / tokens}
    if drafted:
        figures["accepted_share"] = accepted / drafted
    figures |= {name: n for name, n in answers[0].figures.items() if name.startswith(STEP)}
    return Seen(figures, [token for answer in answers for token in answer.own])


def _sum_up(results: Results[Seen]) -> dict[str, list[CaseResult]]:
    made = list[CaseResult]()
    for key, rounds in results.found.items():
        plain, each = results.found[key._replace(way=PLAIN)], gathered(rounds)
        if len({*plain[0].own}) > 1:  # else it always prefers the same token, as made models do
            each["different"] = [
                float(sum(a != b for a, b in zip(ours.own, alone.own, strict=True)))
                for ours, alone in zip(rounds, plain, strict=True)
            ]
        ratios = {PLAIN: Spread.of(quotients(each[RATE], gathered(plain)[RATE]))}
        made.append(CaseResult.of(key, each, ratios))
    return {"results": made}


def read_tasks(
    bundle: Bundle,
    text: str | Path | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    context_length: int | None = None,
) -> dict[str, list[FollowedText]]:
    """Return kind -> its tasks, or the one of a file, see make_workload.

    prompt_tokens: the last ones, if not all; new_tokens: the first ones of each answer (default:
    128). Both give way to the context. Raises InputError.
    """
    context = bundle.manifest.model.max_context if context_length is None else context_length
    if text is not None:
        work = make_workload(bundle, text, prompt_tokens, new_tokens, context_length)
        return {Path(text).name: [FollowedText(work.prompt, work.following)]}
    new = min(NEW_TOKENS if new_tokens is None else new_tokens, context // 2)
    most = context - new if prompt_tokens is None else min(prompt_tokens, context - new)
    if new < 1 or most < 1:
        raise InputError(
            f"prompts of {most} tokens and answers of {new} are asked for; expected at least 1 of "
            f"each, and together no more than the {context} of the context"
        )
    ids = Coder(TextCodec(bundle.file(TOKENIZER)), bundle.manifest.model.vocab_size)
    return {
        kind: [
            FollowedText(ids.of(prompt, begin=True)[-most:], ids.of(answer)[:new])
            for prompt, answer in _texts(kind)
        ]
        for kind in KINDS
    }


def _texts(kind: str) -> Iterator[tuple[str, str]]:
    """Yield prompts and answers of a kind."""
    if kind == "prose":
        paragraphs = DEFAULT_TEXT.read_text("utf-8").splitlines(keepends=True)
        at = 2 * TOLD  # every other line is empty
        yield "".join(paragraphs[:at]), "".join(paragraphs[at:])
        return
    _, *pieces = MARK.split((FOLDER / f"{kind}.txt").read_text("utf-8"))
    yield from zip(pieces[::2], pieces[1::2], strict=True)


class Coder:
    """Token ids of texts, by a tokenizer or by words."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self._codec, self._vocab_size = codec, vocab_size
        letters = codec.encode("words", add_special_tokens=False)
        self._by_words = len(letters) == len("words") and vocab_size >= WORDS_FROM

    def of(self, text: str, *, begin: bool = False) -> list[int]:
        """Return ids; begin: after the begin-of-text token if the model was trained with it."""
        if not self._by_words:
            return self._codec.encode(text, add_special_tokens=begin)
        words = self._vocab_size - FIRST_WORD
        return [FIRST_WORD + zlib.crc32(word.encode()) % words for word in PIECE.findall(text)]

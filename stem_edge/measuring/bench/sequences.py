"""Several sequences at a time: how much faster than one, and how long a new one waits.

Every sequence follows a piece of real text, so that rows are as distinct as those of real answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.cases import (
    ALLOWED,
    FIRST,
    RATE,
    CaseResult,
    Cases,
    Key,
    Results,
    Run,
    Seen,
    Spread,
    gathered,
    quotients,
)
from stem_edge.measuring.bench.together import lengths, texts_of
from stem_edge.measuring.bench.workers import Subject, WorkerProcess, together_phase
from stem_edge.measuring.workload import DEFAULT_TEXT, read_ids, source_of

PROMPT_TOKENS, NEW_TOKENS = 128, 64


def sequences(
    bundle: Bundle,
    counts: Sequence[int],
    text: str | Path | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    context_length: int | None,
) -> Cases[Seen]:
    """Return a case for one sequence, and for each number of them.

    prompt_tokens, new_tokens: of each, the latter while all decode (default: 128 and 64, or a quarter
    and an eighth of a short context). A text that is too short for all is taken several times.
    Raises InputError.
    """
    wanted = sorted({1, *counts})
    if wanted[0] < 1:
        raise InputError(f"sequences has {wanted[0]}; expected numbers from 1 on")
    longest, most = context_length or bundle.manifest.model.max_context, wanted[-1]
    prompt, new, tokens = _sizes(most, prompt_tokens, new_tokens, longest)
    ids = read_ids(DEFAULT_TEXT if text is None else Path(text), bundle)
    begin = _Texts(ids, prompt, new).begin
    cases = {str(count): partial(begin, count) for count in wanted}
    loaded = partial(_many, most=most)
    return Cases(cases, _sum_up, source_of(text), prompt, new, tokens, loaded)


class _Texts:
    """Texts of rounds, one after the other, so that earlier rows do not flatter the row cache."""

    def __init__(self, ids: list[int], prompt: int, new: int) -> None:
        self._ids, self._prompt, self._new, self._at = ids, prompt, new, 0

    def begin(self, count: int) -> Run[Seen]:
        """Return what each subject runs with the next texts."""
        texts = texts_of(self._ids, count, self._prompt, self._new, self._at)
        self._at += sum(len(text.prompt) + len(text.answer) for text in texts)

        def run(worker: WorkerProcess) -> dict[str, Seen]:
            return {"": Seen(worker.together(texts, count).figures)}

        return run


def _sizes(most: int, prompt: int | None, new: int | None, longest: int) -> tuple[int, int, int]:
    """Return the tokens of a prompt, the new ones of an answer, and those of a context."""
    prompt = min(PROMPT_TOKENS, longest // 4) if prompt is None else prompt
    new = min(NEW_TOKENS, longest // 8) if new is None else new
    tokens = prompt + max(lengths(most, prompt, new))
    if prompt < 1 or new < 2 or tokens > longest:
        raise InputError(
            f"{most} sequences with prompts of {prompt} tokens and {new} new ones together take "
            f"contexts of {tokens}; expected at most {longest}, prompts of 1 or more, and 2 or more "
            "new ones: change --prompt-tokens and --new-tokens"
        )
    return prompt, new, tokens


def _many(subject: Subject, most: int) -> Subject:
    """Return a subject that is loaded for several sequences."""
    if subject.kind == "llama.cpp":
        own = {"each": True, "unified": False} | subject.options | {"sequences": most}
    else:  # one more, because a prompt is computed beside the sequences that it joins
        own = subject.options | {"sequences": most + 1}
    return replace(subject, options=own)


def _sum_up(results: Results[Seen]) -> dict[str, list[CaseResult]]:
    found, names = results.found, list(results.watched)
    return {
        "results": [
            _result(results, key) for key in sorted(found, key=lambda key: names.index(key.subject))
        ]
    }


def _result(results: Results[Seen], key: Key) -> CaseResult:
    found, (first, *_) = results.found, results.watched
    alone, each = gathered(found[Key(key.subject, "1")]), gathered(found[key])
    peak = results.watched[key.subject].peaks[together_phase(int(key.case))].unevictable
    each["anonymous"] = [float(peak)] * len(found[key])
    gain = quotients(each[RATE], alone[RATE])
    ratios = {"gain": Spread.of(gain), "first": Spread.of(quotients(each[FIRST], alone[FIRST]))}
    if ALLOWED in each:
        ratios["allowed"] = Spread.of(quotients(gain, each[ALLOWED]))
    if key.subject != first:
        ours = gathered(found[Key(first, key.case)])[RATE]
        ratios["bundle"] = Spread.of(quotients(ours, each[RATE]))
    return CaseResult.of(key, each, ratios)

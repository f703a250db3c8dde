"""Several sequences at a time: how much faster than one, and how long a new one waits.

Every sequence follows a piece of real text, so that rows are as distinct as those of real answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from stem_edge.errors import InputError
from stem_edge.measuring.bench.bench import ROUNDS, machine, settings_of, subjects_of, versions
from stem_edge.measuring.bench.cases import (
    ALLOWED,
    FIRST,
    RATE,
    CaseReport,
    CaseResult,
    Figures,
    Spread,
    check_subjects,
    gathered,
    in_turns,
    loaded,
    medians,
    quotients,
)
from stem_edge.measuring.bench.figures import Settings, peaks_of
from stem_edge.measuring.run.together import lengths, texts_of
from stem_edge.measuring.run.workers import Subject, together_phase
from stem_edge.measuring.run.workload import DEFAULT_TEXT, read_ids, source_of
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions

COUNTS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 128, 64
Measured = dict[tuple[str, int], list[Figures]]  # subject and sequences -> a round each


def bench_sequences(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> CaseReport:
    """Measure a bundle with several numbers of sequences, beside one.

    counts: numbers of sequences. prompt_tokens, new_tokens: of each, the latter while all decode
    (default: 128 and 64, or a quarter and an eighth of a short context). A text that is too short
    for all is taken several times. The other arguments are those of bench (in bench.py).

    Raises InputError, BackendError, and what loading raises.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    wanted = sorted({1, *counts})
    if wanted[0] < 1:
        raise InputError(f"sequences has {wanted[0]}; expected numbers from 1 on")
    longest, most = given.context_length or opened.manifest.model.max_context, wanted[-1]
    prompt, new, tokens = _sizes(most, prompt_tokens, new_tokens, longest)
    settings = replace(
        settings_of(opened, given, source_of(text), tokens, rounds),
        prompt_tokens=prompt,
        new_tokens=new,
    )
    ids = read_ids(DEFAULT_TEXT if text is None else Path(text), opened)
    try:
        notify("making what it is compared with")
        subjects = [_many(each, most) for each in subjects_of(opened, settings, against, work)]
        check_subjects(subjects)
        found = _run(subjects, settings, wanted, ids, notify)
    finally:
        notify("")
    return CaseReport(str(opened.path), machine(), versions(), settings, list(_results(found)))


def _sizes(most: int, prompt: int | None, new: int | None, longest: int) -> tuple[int, int, int]:
    """Return the tokens of prompts, of what is decoded together, and of a context."""
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
    """Return a subject that is loaded for so many sequences."""
    if subject.kind == "llama.cpp":
        own = {"each": True, "unified": False} | subject.options | {"sequences": most}
    else:  # one more, because a prompt is computed beside the sequences that it joins
        own = subject.options | {"sequences": most + 1}
    return replace(subject, options=own)


def _run(
    subjects: Sequence[Subject],
    settings: Settings,
    counts: Sequence[int],
    ids: list[int],
    notify: Callable[[str], None],
) -> Measured:
    """Return the figures of each round by subject and number of sequences."""
    found: Measured = {(subject.name, count): [] for subject in subjects for count in counts}
    begin = 0  # of the next texts, so that rows of earlier ones do not flatter the row cache

    def run(count: int, turn: int) -> None:
        nonlocal begin
        texts = texts_of(ids, count, settings.prompt_tokens, settings.new_tokens, begin)
        begin += sum(len(text.prompt) + len(text.answer) for text in texts)
        for name, worker in workers.items():
            answer = worker.together(texts, count)
            if turn >= 0:
                found[name, count].append(answer.figures)

    with loaded(subjects, settings, notify) as workers:
        in_turns(counts, settings.rounds, notify, run)
        peaks = {name: peaks_of(worker.sampler) for name, worker in workers.items()}
    for (name, count), rounds in found.items():
        anonymous = float(peaks[name][together_phase(count)].unevictable)
        found[name, count] = [figures | {"anonymous": anonymous} for figures in rounds]
    return found


def _results(found: Measured) -> Iterator[CaseResult]:
    for (name, count), rounds in found.items():
        alone, each = gathered(found[name, 1]), gathered(rounds)
        ratios = {
            "gain": Spread.of(quotients(each[RATE], alone[RATE])),
            "first": Spread.of(quotients(each[FIRST], alone[FIRST])),
        }
        if ALLOWED in each:
            ratios["allowed"] = Spread.of(
                quotients(quotients(each[RATE], alone[RATE]), each[ALLOWED])
            )
        first = next(iter(found))[0]
        if name != first:
            ours = gathered(found[first, count])[RATE]
            ratios["bundle"] = Spread.of(quotients(ours, each[RATE]))
        yield CaseResult(name, str(count), "", medians(each), ratios, each)

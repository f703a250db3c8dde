"""Bench of cases: several sequences at a time, or speculation on several kinds of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.bench import ROUNDS, machine, settings_of, subjects_of, versions
from stem_edge.measuring.bench.cases import CaseReport, CaseResult, Cases, Key, Seen
from stem_edge.measuring.bench.figures import Settings, peaks_of
from stem_edge.measuring.bench.rounds import SAMPLE_SECONDS
from stem_edge.measuring.bench.sequences import sequences
from stem_edge.measuring.bench.speculation import speculation
from stem_edge.measuring.bench.workers import Subject, WorkerProcess
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions

SPECULATION = "speculation"


def bench_cases(
    bundle: str | Path,
    cases: str,
    text: str | Path | None = None,
    *,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> CaseReport:
    """Measure a bundle in cases: "1,2,4", so many sequences at a time, or "speculation".

    The other arguments are those of bench (in bench.py); prompt_tokens and new_tokens are of each
    text. Raises InputError, BackendError, and what loading raises.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    made = _made(opened, cases, text, prompt_tokens, new_tokens, given.context_length)
    settings = replace(
        settings_of(opened, given, made.source, made.tokens, rounds),
        prompt_tokens=made.prompt_tokens,
        new_tokens=made.new_tokens,
    )
    try:
        notify("making what it is compared with")
        subjects = subjects_of(opened, settings, against, work)
        results = _run([made.loaded_as(each) for each in subjects], settings, made, notify)
    finally:
        notify("")
    return CaseReport(str(opened.path), machine(), versions(), settings, results)


def _made(
    bundle: Bundle,
    cases: str,
    text: str | Path | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    context_length: int | None,
) -> Cases:
    sizes = text, prompt_tokens, new_tokens, context_length
    if cases == SPECULATION:
        return speculation(bundle, *sizes)
    try:
        counts = [int(number) for number in cases.split(",")]
    except ValueError:
        raise InputError(
            f"cases is {cases!r}; expected numbers of sequences, like 1,2,4, or {SPECULATION}"
        ) from None
    return sequences(bundle, counts, *sizes)


def _run(
    subjects: Sequence[Subject], settings: Settings, cases: Cases, notify: Callable[[str], None]
) -> list[CaseResult]:
    """Run all cases in each round; before them, the last one, as round -1, only warms up."""
    names, rounds = list(cases.begin), settings.rounds
    found: dict[Key, list[Seen]] = {}
    with ExitStack() as stack:
        workers = list[WorkerProcess]()
        for subject in subjects:
            notify(f"loading {subject.name}")
            worker = WorkerProcess(subject, SAMPLE_SECONDS, kinds_interval=math.inf)
            workers.append(stack.enter_context(worker))
            worker.load(settings.context_length, settings.threads)
        for turn in range(-1, rounds):
            these = names if turn >= 0 else names[-1:]
            for number, name in enumerate(these, 1):
                notify(f"round {turn + 1} of {rounds}, {number} of {len(these)}")
                run = cases.begin[name]()
                for worker in workers:
                    for way, seen in run(worker).items():
                        if turn >= 0:
                            found.setdefault(Key(worker.subject.name, name, way), []).append(seen)
        peaks = {worker.subject.name: peaks_of(worker.sampler) for worker in workers}
    return list(cases.results(found, peaks))

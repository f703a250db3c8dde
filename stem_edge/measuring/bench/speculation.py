"""Speculation on four kinds of text: how much faster than without, and how many guesses were right.

The model follows the answers of stem_edge.measuring.run.texts, and computes and guesses as it would if
they were its own. So acceptance is that of these texts, and times are those of the model's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Unpack

from stem_edge.measuring.bench.bench import ROUNDS, machine, settings_of, subjects_of, versions
from stem_edge.measuring.bench.cases import (
    PLAIN,
    RATE,
    STEP,
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
from stem_edge.measuring.bench.figures import Settings
from stem_edge.measuring.run.texts import Task, read_tasks
from stem_edge.measuring.run.together import Text
from stem_edge.measuring.run.workers import Subject
from stem_edge.measuring.run.workload import source_of
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions

# Kind of subject -> ways of decoding, and how many tokens are guessed at a time. Bundles guess as they
# were loaded; 2 tokens are what llama-cpp-python advises on processors, 10 its default.
WAYS = {
    "stem-edge": {PLAIN: 0, "speculation": 1},
    "llama.cpp": {PLAIN: 0, "2 guesses": 2, "10 guesses": 10},
}


class Key(NamedTuple):
    """Key of what is measured in each round."""

    subject: str
    kind: str
    way: str


class Answered(NamedTuple):
    """Answers of one kind in one round, together."""

    figures: Figures
    own: list[int]  # most probable tokens


def bench_speculation(
    bundle: str | Path,
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
    """Measure a bundle with and without speculation.

    text: a file of one kind instead of the four, as for stem_edge.measuring.bench.bench.
    prompt_tokens, new_tokens: of each task (default: whole prompts, 128). The other arguments are
    those of bench, too; options may have those of speculation.

    Raises InputError, BackendError, and what loading raises.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    tasks = read_tasks(opened, text, prompt_tokens, new_tokens, given.context_length)
    tokens = max(task.tokens for task in tasks)
    source = "four kinds of text inside this package" if text is None else source_of(text)
    settings = replace(
        settings_of(opened, given, source, tokens, rounds),
        prompt_tokens=max(len(task.prompt) for task in tasks),
        new_tokens=max(len(task.answer) for task in tasks),
    )
    try:
        notify("making what it is compared with")
        subjects = subjects_of(opened, settings, against, work)
        check_subjects(subjects)
        found = _run(subjects, settings, tasks, notify)
    finally:
        notify("")
    return CaseReport(str(opened.path), machine(), versions(), settings, list(_results(found)))


def _run(
    subjects: Sequence[Subject],
    settings: Settings,
    tasks: Sequence[Task],
    notify: Callable[[str], None],
) -> dict[Key, list[Answered]]:
    """Return the answers of each round."""
    found: dict[Key, list[Answered]] = {}

    def run(kind: str, turn: int) -> None:
        for subject in subjects:
            for way, drafts in WAYS[subject.kind].items():
                each = [
                    (len(task.answer), workers[subject.name].guess(Text(*task[1:]), drafts))
                    for task in tasks
                    if task.kind == kind
                ]
                if turn >= 0:
                    answered = _joined([(n, answer.figures, answer.own) for n, answer in each])
                    found.setdefault(Key(subject.name, kind, way), []).append(answered)

    with loaded(subjects, settings, notify) as workers:
        in_turns(list(dict.fromkeys(task.kind for task in tasks)), settings.rounds, notify, run)
    return found


def _joined(answers: Sequence[tuple[int, Figures, list[int]]]) -> Answered:
    """Add up the answers of a kind."""
    # Without the first token of each, which comes from the prompt.
    tokens = sum(count - 1 for count, _, _ in answers)
    seconds, drafted, accepted = (
        sum(figures[name] for _, figures, _ in answers)
        for name in ("seconds", "drafted", "accepted")
    )
    figures = {RATE: tokens / seconds, "drafted_per_token": drafted / tokens}
    if drafted:
        figures["accepted_share"] = accepted / drafted
    costs = {name: cost for name, cost in answers[0][1].items() if name.startswith(STEP)}
    return Answered(figures | costs, [token for _, _, own in answers for token in own])


def _results(found: dict[Key, list[Answered]]) -> Iterator[CaseResult]:
    for key, rounds in found.items():
        plain = found[key._replace(way=PLAIN)]
        each = gathered([answered.figures for answered in rounds])
        if (
            len({*plain[0].own}) > 1
        ):  # otherwise it always prefers the same token, as made models do
            each["different"] = [
                float(sum(a != b for a, b in zip(ours.own, alone.own, strict=True)))
                for ours, alone in zip(rounds, plain, strict=True)
            ]
        speeds = [answered.figures[RATE] for answered in plain]
        ratios = {PLAIN: Spread.of(quotients(each[RATE], speeds))}
        yield CaseResult(key.subject, key.kind, key.way, medians(each), ratios, each)

"""Speculation on four kinds of text: how much faster than without, and how many guesses were right.

The model follows the answers of stem_edge.measuring.bench.texts, and computes and guesses as it would if
they were its own. So acceptance is that of these texts, and times are those of the model's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stem_edge.bundle.opening import Bundle
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
from stem_edge.measuring.bench.texts import Task, read_tasks
from stem_edge.measuring.bench.together import Text
from stem_edge.measuring.bench.workers import WorkerProcess
from stem_edge.measuring.workload import source_of

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
    kinds = dict.fromkeys(task.kind for task in tasks)
    return Cases(
        {kind: _begin([task for task in tasks if task.kind == kind]) for kind in kinds},
        _sum_up,
        source="four kinds of text inside this package" if text is None else source_of(text),
        prompt_tokens=max(len(task.prompt) for task in tasks),
        new_tokens=max(len(task.answer) for task in tasks),
        tokens=max(task.tokens for task in tasks),
    )


def _begin(tasks: Sequence[Task]) -> Callable[[], Run[Seen]]:
    """Return what each subject runs in each round: all tasks of a kind, in each of its ways."""

    def run(worker: WorkerProcess) -> dict[str, Seen]:
        found = dict[str, Seen]()
        for way, drafts in WAYS[worker.subject.kind].items():
            answers = [worker.guess(Text(*task[1:]), drafts) for task in tasks]
            counts = [len(task.answer) for task in tasks]
            found[way] = _joined(counts, [Seen(each.figures, each.own) for each in answers])
        return found

    return lambda: run


def _joined(counts: Sequence[int], answers: Sequence[Seen]) -> Seen:
    """Add up the answers of a kind, of so many tokens."""
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

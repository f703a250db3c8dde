"""Evaluations on a cluster: windows of a text are scored by a loaded model on each machine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from stem_edge.cluster.memory import on_machine, planned_nbytes
from stem_edge.cluster.sharing import Work, share
from stem_edge.measuring.quality.scores import ScoredWindow, score
from stem_edge.measuring.quality.scoring import Advance, Done, ScoreParts, Scoring

Group: TypeAlias = list[tuple[int, ScoredWindow]]
# Tokens in a piece of work: enough that sending it and its results takes no time beside computing.
GROUP_TOKENS = 2048


def ray_scores(address: str = "auto") -> ScoreParts:
    """Return a function that scores a text on a cluster, for `elsewhere` of stem_edge.evaluate.

    address: "auto" for the cluster that runs here, its host:port, or "local" for this machine alone.
    Bundle and reference must be on a disk that every machine has under the same path, or be named as
    on the hub.
    """
    return partial(_score, address)


def _score(
    address: str, scoring: Scoring, parts: Iterable[ScoredWindow], advance: Advance
) -> Generator[Done]:
    nbytes = planned_nbytes(scoring.bundle, scoring.keywords)
    if scoring.against is not None:
        nbytes *= 2  # as evaluate gives half of the memory to the reference
    work = Work(partial(_open, scoring, nbytes), lambda cpus: nbytes)
    for group in share(address, work, _groups(parts)):
        for done in group:
            advance(len(done.scored.scores[0].likelihood))
            yield done


def _groups(parts: Iterable[ScoredWindow]) -> Iterator[Group]:
    group, tokens = Group(), 0
    for number, part in enumerate(parts):
        group.append((number, part))
        tokens += len(part.token_ids)
        if tokens >= GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _open(scoring: Scoring, nbytes: int, cpus: int) -> Callable[[Group], list[Done]]:
    """Load the models, for as long as this process runs."""
    stack = ExitStack()
    keywords = on_machine(scoring.keywords, cpus, nbytes)
    ways, sources = scoring.with_keywords(keywords).open(stack)

    def work(group: Group) -> list[Done]:
        _ = stack  # keeps the models
        return [Done(number, score(part, sources, _nothing), ways) for number, part in group]

    return work


def _nothing(tokens: int) -> None:
    """Progress is shown by the process that asked."""

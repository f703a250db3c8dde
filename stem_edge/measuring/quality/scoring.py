"""Scoring the parts of a text in this process, or in others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stem_edge.edit_files.file import Edit
from stem_edge.measuring.quality.logit_source import bundle_logits, open_reference
from stem_edge.measuring.quality.scores import Logits, Part, Scored, score
from stem_edge.runtime import load
from stem_edge.runtime.backends.keywords import LoadKeywords

Advance: TypeAlias = Callable[[int], object]


class Ways(NamedTuple):
    """How scores were computed: where this differs, so may the last digits."""

    engine: str
    reference_engine: str | None  # None for a checkpoint, or none at all
    chunk_tokens: int
    kv: str


@dataclass(frozen=True)
class Scoring:
    """Models that score parts of a text; can be pickled."""

    bundle: str | Path  # a folder, or what each machine fetches from a hub; so is `against`
    keywords: LoadKeywords  # of stem_edge.load, for the bundle; context_length is the window
    window: int
    edits: tuple[Edit, ...]
    against: str | Path | None
    against_engine: str

    def with_keywords(self, keywords: LoadKeywords) -> Scoring:
        """Return the same with other keywords."""
        return replace(self, keywords=keywords)

    def open(self, stack: ExitStack) -> tuple[Ways, list[Logits]]:
        """Load the models, which are closed with the stack. Raises what stem_edge.load raises."""
        reference, keywords = None, self.keywords
        if self.against is not None:
            memory, threads = keywords.get("memory"), keywords.get("threads")
            progress = keywords.get("progress")
            reference = open_reference(
                stack, self.against, self.window, memory, threads, progress, self.against_engine
            )
            keywords = keywords | {"memory": reference.memory}
        model = stack.enter_context(load(self.bundle, **keywords))
        stack.enter_context(model.edited(*self.edits))
        sources: list[Logits] = [partial(bundle_logits, model)]
        sources += [reference.logits] if reference else []
        plan, engine = model.plan, reference.engine if reference else None
        return Ways(plan.engine, engine, plan.chunk_tokens, plan.kv), sources


class Done(NamedTuple):
    """A part that is scored."""

    number: int  # of the part
    scored: Scored
    ways: Ways


# Has parts scored, each apart from all others, in any order; calls Advance with tokens done.
Score: TypeAlias = Callable[[Scoring, Iterable[Part], Advance], Generator[Done]]


def score_here(scoring: Scoring, parts: Iterable[Part], advance: Advance) -> Generator[Done]:
    """Score parts in this process, one after the other."""
    with ExitStack() as stack:
        ways, sources = scoring.open(stack)
        for number, part in enumerate(parts):
            yield Done(number, score(part, sources, advance), ways)

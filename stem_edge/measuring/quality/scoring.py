"""Scoring the parts of a text in this process, or in others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stem_edge.edit_files.file import Edit
from stem_edge.measuring.planning.candidates import is_bundle, model_folder, open_checkpoint
from stem_edge.measuring.quality.logit_source import bundle_logits, checkpoint_logits
from stem_edge.measuring.quality.scores import Logits, Scored, ScoredWindow, score
from stem_edge.runtime import Model, load
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.system.memory import own_memory
from stem_edge.units import parse_size

Advance: TypeAlias = Callable[[int], object]


class ScoringWays(NamedTuple):
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

    def open(self, stack: ExitStack) -> tuple[ScoringWays, list[Logits]]:
        """Load the models, which are closed with the stack. Raises what stem_edge.load raises."""
        keywords, references, engine = self.keywords, list[Logits](), None
        if self.against is not None:
            path = model_folder(self.against)
            if is_bundle(path):
                other, left = self._reference(stack, path)
                keywords, engine = keywords | {"memory": left}, other.plan.engine
                references = [partial(bundle_logits, other)]
            else:
                references = [partial(checkpoint_logits, open_checkpoint(path))]
        model = stack.enter_context(load(self.bundle, **keywords))
        stack.enter_context(model.edited(*self.edits))
        ways = ScoringWays(model.plan.engine, engine, model.plan.chunk_tokens, model.plan.kv)
        return ways, [partial(bundle_logits, model), *references]

    def _reference(self, stack: ExitStack, path: Path) -> tuple[Model, int | None]:
        """Load another bundle in half of the memory, and return it and what it leaves."""
        memory = self.keywords.get("memory")
        limit = None if memory is None else parse_size(memory)
        model = load(
            path,
            None if limit is None else limit // 2,
            threads=self.keywords.get("threads"),
            context_length=self.window,
            engine=self.against_engine,
            prefill_graph=False,
            warm_start=False,
            progress=self.keywords.get("progress"),
        )
        stack.enter_context(model)
        # The bundle is planned with this process's memory as it is, so only what the reference has
        # planned and not yet taken must be left out.
        taken = max(0, model.plan.total - own_memory())
        return model, None if limit is None else limit - taken


class Done(NamedTuple):
    """A part that is scored."""

    number: int  # of the part
    scored: Scored
    ways: ScoringWays


# Has parts scored, each apart from all others, in any order; calls Advance with tokens done.
ScoreParts: TypeAlias = Callable[[Scoring, Iterable[ScoredWindow], Advance], Generator[Done]]


def score_here(
    scoring: Scoring, parts: Iterable[ScoredWindow], advance: Advance
) -> Generator[Done]:
    """Score parts in this process, one after the other."""
    with ExitStack() as stack:
        ways, sources = scoring.open(stack)
        for number, part in enumerate(parts):
            yield Done(number, score(part, sources, advance), ways)

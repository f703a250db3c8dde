"""Count answers that guessing changes: where two tokens are nearly equal, rounding decides.

    python tools/experiments/near_ties.py BUNDLE [--text FILE] [--texts 100] [--prompt 64] [--new 64]

Kernels may round a step of several tokens otherwise than steps of one. Each piece of the text is
answered greedily: token by token, then with guesses of which all are right, so that nearly every
token is computed in a step of eight, and then with guesses from the text. Printed are the answers
that differ, by how much the two best logits differed there, and how often so near a tie occurs at
all. A difference of two logits is that of their log probabilities.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import stem_edge
from stem_edge.measuring.run.workload import DEFAULT_TEXT, read_ids
from stem_edge.runtime import Model
from stem_edge.runtime.backends.step_costs import StepCosts
from stem_edge.runtime.speculation.guesses import Guesses
from stem_edge.runtime.speculation.speculation import Speculation

# Costs at which whatever is likely is guessed, so that as many tokens as possible are computed so.
EAGER = StepCosts(seconds=1.0, times={2: 1.1, 4: 1.3, 8: 1.7}, same_bits=False)


class Known(Guesses):
    """Guesses that are right, because the answer is known."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        """Return what follows in the known text."""
        return list(self._text[len(seen) : len(seen) + min(room, 7)])


class KnownAnswer(Speculation):
    """Speculates with a known answer."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(EAGER, 7)
        self._text = text

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int) -> Iterator[Guesses]:
        """Lend the guesses."""
        yield Known(self._text)


class Answered(NamedTuple):
    """Tokens of an answer, and by how much the best logit exceeded the second at each."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[float]


def answer(model: Model, prompt: list[int], new: int, speculation: Speculation | None) -> Answered:
    """Answer greedily."""
    model.stepping = model.stepping._replace(speculation=speculation)
    chunks = model.generate(prompt, max_new_tokens=new, logprobs=2)
    found = [one for chunk in chunks for one in chunk.logprobs or ()]
    margins = [one.top[0][1] - one.top[1][1] for one in found]
    return Answered([one.token_id for one in found], margins, [one.logprob for one in found])


class Comparison:
    """Answers with guesses beside plain ones."""

    def __init__(self, name: str) -> None:
        self.name, self.answers, self.guessed, self.accepted = name, 0, 0, 0
        self.ties: list[float] = []  # plain margins where an answer first differs
        self.rounding = 0.0  # greatest difference of a log probability before that

    def add(self, plain: Answered, found: Answered, model: Model) -> None:
        """Compare an answer with the plain one."""
        self.answers += 1
        self.guessed += model.stats.drafted_tokens
        self.accepted += model.stats.accepted_tokens
        pairs = enumerate(zip(plain.tokens, found.tokens, strict=False))
        first = next((place for place, (a, b) in pairs if a != b), None)
        if first is not None:
            self.ties.append(plain.margins[first])
        alike = zip(plain.logprobs[:first], found.logprobs[:first], strict=False)
        self.rounding = max([self.rounding, *(abs(a - b) for a, b in alike)])

    def line(self, margins: Sequence[float]) -> str:
        """Describe the differences, beside the margins of all tokens."""
        said = (
            f"{self.name}: {len(self.ties)} of {self.answers} answers differ; "
            f"{self.accepted} of {self.guessed} guesses right, log probabilities differ by up to "
            f"{self.rounding:.2g}"
        )
        if self.ties:
            most = max(self.ties)
            near = np.mean(np.array(margins) <= most)
            ties = ", ".join(f"{tie:.2g}" for tie in sorted(self.ties))
            said += f"; margins there: {ties} (as small at {near:.2%} of all tokens)"
        return said


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="text, .npy or .int32")
    for name, count in (("texts", 100), ("prompt", 64), ("new", 64)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    ways = Comparison("all guesses right"), Comparison("guesses from the text")
    margins = list[float]()
    with stem_edge.load(
        args.bundle, threads=args.threads, engine=args.engine, speculate=False
    ) as model:
        ids = read_ids(args.text, model.bundle, args.texts * args.prompt)
        for start in range(0, len(ids) - args.prompt + 1, args.prompt):
            prompt = ids[start : start + args.prompt]
            plain = answer(model, prompt, args.new, None)
            margins += plain.margins
            guessing = KnownAnswer(prompt + plain.tokens), Speculation(EAGER, 7)
            for way, speculation in zip(ways, guessing, strict=True):
                way.add(plain, answer(model, prompt, args.new, speculation), model)
    print(f"{len(margins)} tokens in {ways[0].answers} plain answers")
    for way in ways:
        print(way.line(margins))


if __name__ == "__main__":
    main()

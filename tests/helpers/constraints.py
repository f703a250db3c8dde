"""Constraints written out: the tokens that each place of an answer may have."""

from __future__ import annotations

from typing import Any

from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model


class Places:
    """A constraint (stem_edge.runtime.generation): sets of token ids, the last of which ends it."""

    def __init__(self, places: list[set[int]], *, forces: bool) -> None:
        self.places, self.forces, self.at, self.masked = places, forces, 0, 0

    @property
    def ended(self) -> bool:
        """Whether all places are filled."""
        return self.at == len(self.places)

    def mask(self, logits: Any) -> None:
        """Allow what this place may have."""
        allowed = list(self.places[self.at])
        kept = logits[allowed]
        logits[:] = -float("inf")
        logits[allowed] = kept
        self.masked += 1

    def forced(self, most: int) -> list[int]:
        """Return the tokens of the next places that have one each."""
        found = list[int]()
        for place in self.places[self.at : self.at + most] if self.forces else []:
            if len(place) > 1:
                break
            found += place
        return found

    def accept(self, token_id: int) -> None:
        """Go on to the next place."""
        assert token_id in self.places[self.at]
        self.at += 1


class PlacesOfText:
    """Stands for Grammars: a text has places like "3 4|5 6-90"."""

    def __init__(self, *, forces: bool = True) -> None:
        self.forces, self.opened = forces, list[Places]()

    def open(self, grammar: Grammar) -> Places:
        """Open a constraint."""
        places = list[set[int]]()
        for place in grammar.text.split():
            ends = [list(map(int, part.split("-"))) for part in place.split("|")]
            places.append({n for end in ends for n in range(end[0], end[-1] + 1)})
        self.opened.append(Places(places, forces=self.forces))
        return self.opened[-1]


def constrain(model: Model, *, forces: bool = True) -> PlacesOfText:
    """Let a model read grammars thus."""
    grammars = PlacesOfText(forces=forces)
    vars(model)["_grammars"] = grammars
    return grammars

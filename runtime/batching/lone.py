"""A sequence that runs alone, until another one begins; and the memory that sequences take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from stem_edge.errors import OutOfMemoryError
from stem_edge.runtime.backends.interface import MOST
from stem_edge.runtime.batching.request import Guessing, Request
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.generation import Sampled
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.prefixes.prefix import in_steps
from stem_edge.runtime.stats import Recorder


class Sizes(NamedTuple):
    """Bytes of keys and values.

    nbytes_of: tokens -> bytes. length: most tokens of a sequence.
    """

    nbytes_of: Callable[[int], int]
    length: int

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of `tokens` tokens."""
        return self.nbytes_of(min(in_steps(tokens), self.length))


class Lone:
    """Decodes `request`, if there is one, in its context and with guesses, as Model.generate does.

    record, exact: see Decoding.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: Prefixes,
        sizes: Sizes,
        record: Recorder,
        guessing: Guessing,
        *,
        exact: bool,
    ) -> None:
        self.request: Request | None = None
        self._engine, self._prefixes, self._sizes = engine, prefixes, sizes
        self._record, self._guessing, self._exact = record, guessing, exact

    def step(self, request: Request) -> Iterator[Sampled]:
        """Process the token chosen last, with what may follow it; yield those chosen."""
        self._prefixes.make_room(request.context, MOST)
        decoding = request.alone(self._engine, self._record, self._guessing, exact=self._exact)
        return decoding.step()

    def leaves(self, request: Request, nbytes: int) -> bool:
        """Return whether a context of `nbytes` bytes fits once it has been copied into a batch.

        Its own is free before the other begins.
        """
        own = self._sizes.nbytes(request.position + MOST)
        nbytes = max(nbytes, own) + self._sizes.nbytes(request.length)
        return self._prefixes.fits(nbytes, without=request.context)

    def lets_begin(self, request: Request, *, beside: bool) -> bool:
        """Return whether memory allows another request. beside: it will join a batch that copies."""
        sizes = self._sizes
        if not beside:
            return self._prefixes.fits(sizes.nbytes(request.length))
        nbytes = sizes.nbytes(request.length) + sizes.nbytes(len(request.prompt))
        lone = self.request
        return self._prefixes.fits(nbytes) if lone is None else self.leaves(lone, nbytes)

    def move(self, request: Request, join: Callable[[Request], None], *, copies: bool) -> bool:
        """Let the request join a batch; return False if memory is short, so that it goes on alone.

        copies: whether the batch takes memory beside the context's.
        """
        try:
            if copies:
                request.reserve(self._prefixes, self._sizes.nbytes(request.length))
            else:
                self._prefixes.make_room(request.context, request.context.room)
            join(request)
            self.request = None
        except OutOfMemoryError:
            self._engine.check_usable()
            request.release()
            return False
        return True

"""Thoughts of a model before its answer, as chat templates mark them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from stem_edge.text.tool_calls.arriving import SPACE, ArrivingText, Reading

LAST_TOKENS = 16  # of a prompt, which have the marker that begins thoughts if one does


@dataclass(frozen=True)
class Thoughts:
    """Markers around thoughts. special: special tokens in them, whose names the text must keep."""

    begin: str
    end: str
    special: tuple[str, ...] = ()

    def parser(self, prompt: str) -> ThoughtParser:
        """Return a parser for an answer to a prompt, whose end may begin the thoughts."""
        return ThoughtParser(self, inside=prompt.rstrip().endswith(self.begin))


KNOWN = (
    Thoughts("<|channel>thought", "<channel|>"),  # Gemma 4
    Thoughts("<think>", "</think>"),  # Qwen, DeepSeek, LFM and others
)


def thoughts_of(template_source: str, special_tokens: Collection[str] = ()) -> Thoughts | None:
    """Return the markers of a chat template, which takes thoughts out of earlier turns by the end."""
    for known in KNOWN:
        if known.end in template_source:
            names = (n for n in special_tokens if n == known.end or known.begin.startswith(n))
            return replace(known, special=tuple(names))
    return None


class ThoughtParser:
    """Parser of one answer, made by Thoughts.parser. White space around thoughts does not come out.

    Markers count before the answer alone, because an answer, or a call in it, may be about them. But
    special tokens in them come out nowhere, because no message that is sent back may name one.
    inside: whether the answer begins with thoughts, without a marker.
    """

    def __init__(self, thoughts: Thoughts, *, inside: bool) -> None:
        self._marks, self._inside = thoughts, inside
        self._text = ArrivingText()
        self._thought, self._content = list[str](), list[str]()
        self._reading = self._read()

    def push(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """Return the thoughts, and the content after them, that are certain with this delta."""
        self._text.add(text)
        self._text.ended = ended
        next(self._reading, None)
        thought, content = "".join(self._thought), "".join(self._content)
        self._thought.clear()
        self._content.clear()
        for name in self._marks.special:  # which comes in one delta, as it is one token
            thought, content = thought.replace(name, ""), content.replace(name, "")
        return thought, content

    def _read(self) -> Reading[None]:
        text = self._text
        yield from text.space()
        # Some models repeat the marker that their prompt ends with.
        if (yield from text.skip(self._marks.begin)) or self._inside:
            yield from self._read_thought()
        self._content.append(text.release())
        while (yield from text.peek()):
            yield from text.take()
            self._content.append(text.release())

    def _read_thought(self) -> Reading[None]:
        text = self._text
        yield from text.space()
        text.release()
        while (yield from text.peek()) and not (yield from text.skip(self._marks.end)):
            if (yield from text.peek()) in SPACE:
                yield from text.space()  # held, because the end may follow
            else:
                yield from text.take()
                self._thought.append(text.release())
        yield from text.space()
        text.release()

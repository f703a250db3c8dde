"""Separates a model's thoughts from its answer, by markers such as <think> around them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

SPACE = " \t\r\n"
LAST_TOKENS = 16  # tokens at the end of a prompt, where the begin marker of thoughts may be


@dataclass(frozen=True)
class Thoughts:
    """Markers around thoughts. special: special tokens in the markers; decoding must keep them."""

    begin: str
    end: str
    special: tuple[str, ...] = ()

    def parser(self, prompt: str) -> ThoughtParser:
        """Return a parser for one answer. If `prompt` ends with `begin`, thoughts come first."""
        return ThoughtParser(self, inside=prompt.rstrip().endswith(self.begin))


KNOWN = (
    Thoughts("<|channel>thought", "<channel|>"),  # Gemma 4
    Thoughts("<think>", "</think>"),  # Qwen, DeepSeek, LFM and others
)


def thoughts_of(template_source: str, special_tokens: Collection[str] = ()) -> Thoughts | None:
    """Return a chat template's thought markers, or None. special_tokens: the tokenizer's."""
    for known in KNOWN:
        if known.end in template_source:
            names = (n for n in special_tokens if n == known.end or known.begin.startswith(n))
            return replace(known, special=tuple(names))
    return None


class ThoughtParser:
    """Splits one answer into thoughts and content. It removes white space around thoughts.

    Markers in the content are text, because an answer may mention markers. But markers that are special
    tokens are removed everywhere, because messages that come back must not contain special tokens.
    inside: True if the answer begins with thoughts, without a marker.
    """

    def __init__(self, thoughts: Thoughts, *, inside: bool) -> None:
        self._marks, self._inside = thoughts, inside
        self._state: Literal["before", "thoughts", "after", "content"] = "before"
        self._text = ""  # text that is held back
        self._lead = True  # no thought has come out yet

    def push(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """Add text; return (thoughts, content) that are final. ended: no more text follows."""
        self._text, thought = self._text + text, ""
        if self._state == "before":
            self._begin(ended=ended)
        if self._state == "thoughts":
            thought = self._read_thought(ended=ended)
        if self._state == "after" and self._text.lstrip(SPACE):
            self._text, self._state = self._text.lstrip(SPACE), "content"
        content = ""
        if self._state == "content":
            content, self._text = self._text, ""
        for name in self._marks.special:  # each is one token, so it comes in one piece
            thought, content = thought.replace(name, ""), content.replace(name, "")
        return thought, content

    def _begin(self, *, ended: bool) -> None:
        begin, text = self._marks.begin, self._text.lstrip(SPACE)
        if not ended and text != begin and begin.startswith(text):
            return
        # Some models repeat the marker that their prompt ends with.
        if text.startswith(begin) or self._inside:
            self._text, self._state = text.removeprefix(begin), "thoughts"
        else:
            self._state = "content"

    def _read_thought(self, *, ended: bool) -> str:
        """Return new thoughts. Text that could begin an end marker is held back, unless `ended`."""
        text, end = self._text, self._marks.end
        if self._lead:
            text = text.lstrip(SPACE)
        thought, found, rest = text.partition(end)
        if found:
            self._text, self._state = rest, "after"
            return thought.rstrip(SPACE)
        parts = (end[:count] for count in range(len(end) - 1, 0, -1))
        part = "" if ended else next((part for part in parts if text.endswith(part)), "")
        thought = text.removesuffix(part).rstrip(SPACE)
        self._text = text[len(thought) :]
        self._lead = self._lead and not thought
        return thought

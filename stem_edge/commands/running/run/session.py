"""A chat of `stem-edge run`: prints answers, statistics, notes and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from stem_edge.commands.options.answers import as_object, write_text
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.conversations.conversation import Conversation
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Chunk


@dataclass
class Session:
    """A chat session: the conversation and how it is printed.

    quiet: print only answers, without statistics and notes. explain: replaces Python names in errors by options.
    """

    model: Model
    conversation: Conversation
    params: SamplingParams
    interactive: bool
    as_json: bool
    quiet: bool
    explain: Callable[[str], str]
    failed: bool = False  # True if a message or a command was refused
    files: set[Path] = field(default_factory=set)  # that contain this conversation, now or earlier

    def send(self, text: str) -> None:
        """Print the answer to a message."""
        self._print(self.conversation.send(text, self.params))

    def retry(self) -> None:
        """Print another answer to the last message."""
        before = self.conversation.messages[-1:]
        self._print(self.conversation.retry(self.params))
        if self.conversation.messages[-1:] == before:
            self.tell(
                "the same answer again; /set temperature 0.7, and give no --seed, to get others"
            )

    def fail(self, error: StemEdgeError) -> None:
        """Print an error after which the conversation goes on."""
        self.failed = True
        message = self.explain(" ".join(str(error).split()))
        if self.as_json:
            print(json.dumps({"error": message}, ensure_ascii=False), flush=True)
        else:
            self.tell(f"stem-edge: {message}")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _print(self, chunks: Generator[Chunk]) -> None:
        """Print an answer while it is generated, then its statistics, even if it is interrupted."""
        done: list[Chunk] = []
        thinking = 0  # tokens
        try:
            for chunk in chunks:
                done.append(chunk)
                if chunk.thoughts:
                    thinking += len(chunk.token_ids)
                    self._fold(f"\rthinking: {thinking} tokens")
                if chunk.text and thinking:
                    self._fold("\n")
                    thinking = 0
                if not self.as_json:
                    write_text(chunk.text)
        finally:
            chunks.close()
            if done:
                self._complete(done)

    def _fold(self, text: str) -> None:
        """Write a progress line to the terminal while the model reasons; reasoning is not shown."""
        if self.interactive and not self.as_json:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _complete(self, done: list[Chunk]) -> None:
        if self.as_json:
            answer = as_object(done, self.model.stats)
            print(json.dumps(answer, ensure_ascii=False), flush=True)
            return
        write_text("\n")
        cut = self._why_cut(done)
        if self.interactive and not self.quiet:
            self.tell("; ".join([self.model.stats.line(), *cut]))
        elif cut and not self.quiet:
            self.tell(f"stem-edge: note: {cut[0]}")

    def _why_cut(self, done: list[Chunk]) -> list[str]:
        if done[-1].finish_reason != "length":
            return []
        if self.model.stats.new_tokens == self.params.max_new_tokens:
            return [f"cut at {self.params.max_new_tokens} tokens (--max-new-tokens)"]
        return [f"the context of {self.model.plan.context_length} tokens is full (/undo or /new)"]

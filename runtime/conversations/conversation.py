"""A conversation is a list of messages. Each turn adds a user message and its answer."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from stem_edge.errors import InputError
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.scheduling.request import Chunk
from stem_edge.runtime.text.chat import Messages
from stem_edge.runtime.text.codec import shorten
from stem_edge.text.messages import Object, checked_messages
from stem_edge.text.thoughts import LAST_TOKENS, ThoughtParser

if TYPE_CHECKING:
    from stem_edge.runtime.answering import Answering


class Conversation:
    """A list of messages, and methods that generate answers. Made by Model.conversation.

    Use it in one thread. Each of `messages` has a role and a content, and may be changed between turns. Each turn
    renders all messages with the bundle's chat template. Without a template, it joins their contents. The first
    chunk of an answer adds the user message and the answer to `messages`. If an answer is cut short (Ctrl-C, a
    closed iterator, an error), `messages` has its text so far. Model.stats has the metrics of the latest turn.

    Chunks have the model's thoughts in `thoughts`, not in `text`. Messages have them in `reasoning_content`.
    An answer that follows a grammar has no thoughts.
    """

    def __init__(
        self, model: Answering, messages: Messages, template_arguments: Mapping[str, Any] | None
    ) -> None:
        self.messages = checked_messages(messages) if messages else []
        self._model, self._template_arguments = model, template_arguments
        # Weak, so that an answer ends and gives its KV cache back when its iterator is dropped.
        self._answer: weakref.ref[Generator[Chunk]] | None = None

    def send(
        self, text: str, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Generator[Chunk]:
        """Answer a user message; yield each chunk of the answer. Takes the options of `generate`.

        Raises InputError at once for a message that exceeds the context or that the chat template refuses,
        and every error of Model.generate. A message that raises InputError is not added to `messages`.
        """
        history = [*self.messages, {"role": "user", "content": text}]
        return self._begin(history, params, options)

    def retry(
        self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Generator[Chunk]:
        """Generate another answer to the last user message; yield each chunk. Options and errors: see `send`.

        The first chunk replaces the old answer in `messages`. Raises InputError if there is no user message.
        """
        return self._begin(self.messages[: self._last_question() + 1], params, options)

    def undo(self) -> str:
        """Remove the last user message and its answer; return the content of that message."""
        self.close()
        at = self._last_question()
        content = str(self.messages[at]["content"])
        del self.messages[at:]
        return content

    def _last_question(self) -> int:
        roles = [message["role"] for message in self.messages]
        if "user" not in roles:
            raise InputError("there is no message of the user yet; give one first")
        return len(roles) - 1 - roles[::-1].index("user")

    def _begin(
        self, history: list[Object], params: SamplingParams | None, options: SamplingOptions
    ) -> Generator[Chunk]:
        self.close()
        self._model.engine.check_usable()
        ids = self._model.chat.ids(history, template_arguments=self._template_arguments)
        held, most = self._model.plan.context_length, self._model.config.max_context
        if len(ids) > held:
            raise InputError(
                f"with this message the conversation has {len(ids)} tokens, the context holds {held}; undo turns or "
                f"begin a new conversation (in run: /undo or /new), or {shorten(held, most)}"
            )
        params, parser = params_of(params, options), None
        thoughts = self._model.chat.thoughts if params.grammar is None else None
        if thoughts is not None:
            kept = (*params.kept_special_tokens, *thoughts.special)
            params = replace(params, kept_special_tokens=kept)
            end = self._model.detokenize(ids[-LAST_TOKENS:], skip_special_tokens=False)
            parser = thoughts.parser(end)
        answer = self._keep(history, self._model.generate(ids, params), parser)
        self._answer = weakref.ref(answer)
        return answer

    def _keep(
        self, history: list[Object], chunks: Generator[Chunk], parser: ThoughtParser | None
    ) -> Generator[Chunk]:
        """Yield the chunks of an answer; set `messages` to `history` and the answer so far."""
        answer: Object | None = None
        try:
            for chunk in chunks:
                if parser is not None:
                    ended = chunk.finish_reason is not None
                    thoughts, text = parser.push(chunk.text, ended=ended)
                    chunk = replace(chunk, text=text, thoughts=thoughts)
                if answer is None:
                    answer = {"role": "assistant", "content": ""}
                    self.messages[:] = [*history, answer]
                answer["content"] += chunk.text
                if chunk.thoughts:
                    before = answer.get("reasoning_content", "")
                    answer["reasoning_content"] = before + chunk.thoughts
                yield chunk
        finally:
            chunks.close()

    def close(self) -> None:
        """Stop an answer that is still being generated. The conversation can continue."""
        if self._answer is not None and (answer := self._answer()) is not None:
            answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

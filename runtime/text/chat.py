"""Chat prompts from a bundle's chat template. Messages cannot forge turns of the conversation."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import ChatPrompt, TextCodec
from stem_edge.shown import printable
from stem_edge.text.chat_template import ChatTemplate, has_template, read_template
from stem_edge.text.messages import (
    checked_messages,
    checked_template_arguments,
    checked_tools,
    texts,
)
from stem_edge.text.thoughts import Thoughts, thoughts_of

if TYPE_CHECKING:
    from stem_edge.text.tool_calls.families import Family

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Chat:
    """The chat template of a bundle, read on first use. Call `close` after use."""

    def __init__(self, path: Path, codec: TextCodec) -> None:
        self._path, self._codec = path, codec
        self._lock = threading.RLock()  # re-entrant, for a signal handler
        self._template: ChatTemplate | None = None

    @cached_property
    def has_template(self) -> bool:
        """True if the bundle has a chat template, working or not. Raises BundleError."""
        return has_template(self._path)

    @property
    def tool_family(self) -> Family | None:
        """The format of the template's tool calls; None if unknown. Raises BundleError."""
        if not self.has_template:
            return None
        from stem_edge.text.tool_calls.families import family_of  # half a megabyte, which few need

        return family_of(read_template(self._path)[1], self._codec.special_tokens)

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The markers around a model's thoughts; None if they are unknown. Raises BundleError."""
        if not self.has_template:
            return None
        return thoughts_of(read_template(self._path)[0], self._codec.special_tokens)

    def prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tools: Tools | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        special_tokens_in_text: bool = False,
    ) -> ChatPrompt:
        """Render messages as a prompt. Raises BundleError if the template is broken.

        Raises InputError without a template, or (unless special_tokens_in_text) for names of
        special tokens in messages, tools or arguments, because they could begin a forged message.
        """
        given, offered = checked_messages(messages), checked_tools(tools)
        arguments = checked_template_arguments(template_arguments)
        if not special_tokens_in_text:
            said = {"messages": given, "tools": offered, "template_arguments": arguments}
            for name, value in said.items():
                self._refuse_special(name, value)
        with self._lock:
            self._template = self._template or ChatTemplate(self._path)
        rendered = self._template.render
        return ChatPrompt(
            rendered(given, add_generation_prompt, tools=offered, arguments=arguments)
        )

    def ids(
        self,
        messages: Messages,
        tools: Tools | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of messages: rendered by the chat template or, if there is none, joined.

        Raises InputError for messages without text, and the errors of `prompt`.
        """
        if self.has_template:
            text: str = self.prompt(messages, tools=tools, template_arguments=template_arguments)
        else:
            text = "".join(message["content"] for message in checked_messages(messages))
        if not text:
            raise InputError("the messages have no text; give some")
        return self._codec.encode(text, special_tokens_in_text=False)

    def _refuse_special(self, name: str, value: object) -> None:
        for where, text in texts(name, value):
            if token := self._codec.special_in(text):
                raise InputError(
                    f"{printable(where)} names the special token {token!a}, which could end its turn; remove it"
                )

    def close(self) -> None:
        """Stop the process that renders the template. Can be called twice."""
        if self._template is not None:
            self._template.close()

"""Conversations as prompts: the chat template of a bundle, and messages that cannot forge turns."""

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
    """Chat template of a bundle, read when first needed; close it after use."""

    def __init__(self, path: Path, codec: TextCodec) -> None:
        self._path, self._codec = path, codec
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None

    @cached_property
    def has_template(self) -> bool:
        """True if the bundle has a chat template, working or not. Raises BundleError."""
        return has_template(self._path)

    @property
    def tool_family(self) -> Family | None:
        """How the template writes calls of tools; None without a template, or a family known here.

        Raises BundleError.
        """
        if not self.has_template:
            return None
        from stem_edge.text.tool_calls.families import family_of  # half a megabyte, which few need

        return family_of(read_template(self._path)[1], self._codec.special_tokens)

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """How the template marks thoughts; None without one, or marks known here. Raises BundleError."""
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
        """Text of a conversation. Raises what ChatTemplate raises.

        Raises InputError for a text in messages, tools or arguments that names a special token,
        because it could end its turn and begin another's, unless special_tokens_in_text.
        """
        given, offered = checked_messages(messages), checked_tools(tools)
        arguments = checked_template_arguments(template_arguments)
        if not special_tokens_in_text:
            for each in (
                ("messages", given),
                ("tools", offered),
                ("template_arguments", arguments),
            ):
                self._refuse_special(*each)
        with self._lock:
            self._template = self._template or ChatTemplate(self._path)
        rendered = self._template.render
        return ChatPrompt(
            rendered(given, add_generation_prompt, tools=offered, arguments=arguments)
        )

    def _refuse_special(self, name: str, value: object) -> None:
        for where, text in texts(name, value):
            if token := self._codec.special_in(text):
                raise InputError(
                    f"{printable(where)} names the special token {token!a}, which could end its turn; remove it"
                )

    def close(self) -> None:
        """End the process of the template; closing twice is fine."""
        if self._template is not None:
            self._template.close()

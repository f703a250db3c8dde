"""Conversations as prompts: the chat template of a bundle, and messages that cannot forge turns."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text.chat_template import ChatTemplate, checked_messages, has_template

Messages = Sequence[Mapping[str, str]]


class Chat:
    """Chat template of a bundle, read when first needed; close it after use."""

    def __init__(self, path: Path, codec: TextCodec) -> None:
        self._path, self._codec = path, codec
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        """Whether the bundle has a chat template, working or not. Raises BundleError."""
        return self._template is not None or has_template(self._path)

    def prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        special_tokens_in_text: bool = False,
    ) -> str:
        """Text of a conversation. Raises what ChatTemplate raises.

        Raises InputError for a message that names a special token, because it could end its turn
        and begin another's, unless special_tokens_in_text.
        """
        given = checked_messages(messages)
        for number, message in enumerate([] if special_tokens_in_text else given):
            for token in self._codec.special_tokens:
                if token in message["content"]:
                    raise InputError(
                        f"messages[{number}].content names the special token {token!a}, which "
                        "could end its turn; remove it, or give special_tokens_in_text=True"
                    )
        with self._lock:
            self._template = self._template or ChatTemplate(self._path)
        return self._template.render(given, add_generation_prompt)

    def close(self) -> None:
        """End the process of the template; closing twice is fine."""
        if self._template is not None:
            self._template.close()

"""The text methods of a loaded bundle: tokenizing, detokenizing, chat prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stem_edge.bundle.manifest import TOKENIZER_CONFIG
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.text.codec import ChatPrompt, TextCodec

if TYPE_CHECKING:
    from stem_edge.runtime.text.chat import Chat, Messages, Tools
    from stem_edge.text.tool_calls.families import Family


class ModelText:
    """The methods of a Model that need no computation: text, token ids, chat prompts."""

    def __init__(self, bundle: Bundle, text: TextCodec) -> None:
        self.bundle, self._text = bundle, text

    @cached_property
    def chat(self) -> Chat:
        from stem_edge.runtime.text.chat import Chat  # only for conversations

        return Chat(self.bundle.file(TOKENIZER_CONFIG), self._text)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.bundle.manifest.model

    def chosen(self, params: SamplingParams, otherwise: Mapping[str, float] = {}) -> SamplingParams:
        """Return params in which the model's recommended values replace missing (None) values.

        otherwise: values to use if the model recommends no temperature.
        """
        own = self.bundle.manifest.sampling
        return params.resolved({} if own is None else own.values(), otherwise)

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        special_tokens_in_text: bool = False,
    ) -> list[int]:
        """Return the token ids of a text, with begin-of-text if the model was trained with it.

        special_tokens_in_text: convert names of special tokens in the text to these tokens. By default
        they are ordinary text, except in results of chat_prompt.
        """
        return self._text.encode(
            text,
            add_special_tokens=add_special_tokens,
            special_tokens_in_text=special_tokens_in_text,
        )

    def limit_texts(self, memory: int) -> None:
        """Set how many bytes this process may take while tokenizing, in place of load's limit."""
        if self._text.room is not None:
            self._text.room = self._text.room._replace(limit=memory)

    def chat_prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tools: Tools | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        special_tokens_in_text: bool = False,
    ) -> ChatPrompt:
        """Render messages with the bundle's chat template; return a text for generate or tokenize.

        tools: functions that the model may call, in OpenAI's format; template_arguments: variables of the
        template, such as {"enable_thinking": False}.
        """
        return self.chat.prompt(
            messages,
            add_generation_prompt,
            tools=tools,
            template_arguments=template_arguments,
            special_tokens_in_text=special_tokens_in_text,
        )

    @property
    def has_chat_template(self) -> bool:
        """True if the bundle has a chat template."""
        return self.chat.has_template

    @property
    def tool_family(self) -> Family | None:
        """The format in which the model writes tool calls; None if its chat template is unknown."""
        return self.chat.tool_family

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        from stem_edge.runtime.token_ids import checked_ids

        ids = checked_ids(token_ids, self.config.vocab_size)
        return self._text.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        return self._text.token_bytes(token_id)

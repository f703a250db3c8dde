"""Answers to a conversation as a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stem_edge.runtime.batching.request import Request
from stem_edge.serving.answers import Whole
from stem_edge.serving.openai.shapes import head, usage
from stem_edge.serving.token_texts import TokenTexts


def completion(
    name: str, answers: Sequence[Whole], requests: Sequence[Request], texts: TokenTexts
) -> dict[str, Any]:
    """Return all answers to one conversation as one object. name: of the model."""
    return head(name, "chatcmpl", "chat.completion") | {
        "choices": [_choice(index, each, texts) for index, each in enumerate(answers)],
        "usage": usage(requests, len(requests)),
    }


def _choice(index: int, answer: Whole, texts: TokenTexts) -> dict[str, Any]:
    calls, found = [_call(**call) for call in answer.calls], answer.logprobs
    content = answer.text or (None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None}
    return {
        "index": index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": None if found is None else texts.chat_logprobs(found),
        "finish_reason": answer.reason,
    }


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

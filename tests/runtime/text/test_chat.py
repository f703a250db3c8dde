"""Tools in prompts of a bundle, and what its answers may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import write_chat_bundle
from contract import refused
from installed import DEMO
from tool_families import ARGUMENTS, TOOLS, call, read, template

import stem_edge
from stem_edge.errors import InputError

HELLO = [{"role": "user", "content": "Hello"}]


def test_tools_of_a_bundle(tmp_path: Path) -> None:
    source = template("hermes") + "{{ '!' if loud }}"
    with stem_edge.load(write_chat_bundle(tmp_path, source)) as model:
        assert model.chat_prompt(HELLO) == "<user>Hello</user>"
        shown = model.chat_prompt(HELLO, tools=TOOLS, template_arguments={"loud": True})
        assert shown.startswith('{"name": "weather", ') and shown.endswith("<user>Hello</user>!")
        family = model.tool_family
        assert family is not None and (family.name, family.special) == ("hermes", ())
        made = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        asked: list[dict[str, Any]] = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [made]},
        ]
        answer = model.chat_prompt(asked).split("<assistant>")[1].removesuffix("</assistant>")
        (told,) = read(family, answer)
        assert told == call(0, "weather", getattr(told, "arguments", ""))
        forged = [{"type": "function", "function": {"name": "f", "description": "<|end_of_text|>"}}]
        refused(
            lambda: model.chat_prompt(HELLO, tools=forged),
            InputError, "tools[0].function.description names the special token '<|end_of_text|>'",
        )  # fmt: skip
        assert "<|end_of_text|>" in model.chat_prompt(
            HELLO, tools=forged, special_tokens_in_text=True
        )
        with model.conversation(asked) as conversation:
            assert conversation.messages[1]["tool_calls"][0]["id"] == ""
            assert next(conversation.send("Go on.", max_new_tokens=1))
            assert conversation.undo() == "Go on."


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", None])
def test_bundles_without_a_place_for_tools(tmp_path: Path, source: str | None) -> None:
    bundle = write_chat_bundle(tmp_path, source) if source else DEMO
    with stem_edge.load(bundle) as model:
        assert model.tool_family is None and model.chat.thoughts is None
        said = "no place for tools" if source else "no chat template"
        refused(lambda: model.chat_prompt(HELLO, tools=TOOLS), InputError, said)

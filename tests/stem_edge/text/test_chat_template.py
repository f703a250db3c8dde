"""Chat templates with tools: which of several is taken, and what it is given."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from contract import refused
from tokenizer_files import added
from tokenizer_files import write as write_tokenizer
from tool_families import TOOLS, template

from stem_edge.errors import InputError
from stem_edge.runtime.text.chat import Chat
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.text.chat_template import MAX_TEMPLATE_NBYTES, ChatTemplate, read_template

HELLO = [{"role": "user", "content": "Hello"}]
SEVERAL = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "{{ tools[1].function.name }}{{ tools | length }}"},
    {"name": "rag", "template": "x" * (MAX_TEMPLATE_NBYTES + 1)},
]


def write(folder: Path, given: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": given, "eos_token": "<e>"}))
    return path


def test_one_of_several_templates_is_for_tools(tmp_path: Path) -> None:
    with closing(ChatTemplate(write(tmp_path, SEVERAL))) as chat:
        assert chat.render(HELLO) == "plain" == chat.source
        assert chat.render(HELLO, tools=TOOLS) == "now2"
        assert chat.render(HELLO, tools=[]) == "plain"


@pytest.mark.parametrize(
    "given", [SEVERAL[1:2], [], [3, "x"], [{"name": "default"}], [{"name": 3, "template": "x"}], {}]
)
def test_lists_without_a_template_for_every_conversation(tmp_path: Path, given: object) -> None:
    refused(lambda: read_template(write(tmp_path, given)), InputError, "no chat template")


def test_variables_for_a_template(tmp_path: Path) -> None:
    source = "{{ enable_thinking | default('unset') }} {{ eos_token }} {{ messages | length }}"
    with closing(ChatTemplate(write(tmp_path, source))) as chat:
        assert chat.render(HELLO) == "unset <e> 1"
        assert chat.render(HELLO, arguments={"enable_thinking": False}) == "False <e> 1"


def test_the_family_of_a_bundle(tmp_path: Path) -> None:
    tokens = [added(2, "<|tool_call>", special=True), added(3, "<tool_call|>")]
    codec = TextCodec(write_tokenizer(tmp_path / "tokenizer.json", added_tokens=tokens))
    several = [SEVERAL[0], {"name": "tool_use", "template": template("gemma4")}]
    family = Chat(write(tmp_path, several), codec).tool_family
    assert family is not None and (family.name, family.special) == ("gemma4", ("<|tool_call>",))
    for given in (None, "plain", SEVERAL):
        assert Chat(write(tmp_path, given), codec).tool_family is None

"""Thoughts before answers: which templates mark them, and how answers are read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stem_edge.text.thoughts import thoughts_of

GEMMA = thoughts_of("'<|channel>thought\\n' + text + '\\n<channel|>'") or pytest.fail()
THINK = thoughts_of("content.split('</think>')[-1]") or pytest.fail()

CASES = [
    (THINK, "", "<think>\nOne\n\ntwo.\n</think>\n\nHi \n", "One\n\ntwo.", "Hi \n"),
    (THINK, "", " <think>a</think> b", "a", "b"),
    (THINK, "", "<think>\n\n</think>\n\nHi", "", "Hi"),
    (THINK, "", "<think>a </thin</think> <think>b</think>", "a </thin", "<think>b</think>"),
    (THINK, "", " \n<thin Hi ", "", " \n<thin Hi "),
    (THINK, "", "Say <think>a</think>.", "", "Say <think>a</think>."),
    (THINK, "", "<thi", "", "<thi"),
    (THINK, "", "", "", ""),
    (THINK, "", "<think>\nOn ", "On", ""),
    (THINK, "A: <think>\n", "One.\n</think>\n\nHi", "One.", "Hi"),
    (THINK, "A: <think>\n", "<think>\nOne.</think>Hi", "One.", "Hi"),
    (THINK, "A: <think>\n", "One</think", "One</think", ""),
    (THINK, "A: <think>\n\n</think>\n\n", "Hi", "", "Hi"),
    (THINK, "<think>A: ", "Hi</think>", "", "Hi</think>"),
    (GEMMA, "", "<|channel>thought\nOne<channel|>Hi", "One", "Hi"),
    (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "Hi", "", "Hi"),
    (GEMMA, "<|turn>model\n<|channel>thought\n", "One\n<channel|>\nHi", "One", "Hi"),
    (GEMMA, "", '<|tool_call>call:now{a:<|"|><|channel>thought<|"|>}', "",
     '<|tool_call>call:now{a:<|"|><|channel>thought<|"|>}'),
]  # fmt: skip


@pytest.mark.parametrize(("thoughts", "prompt", "text", "thought", "content"), CASES)
def test_an_answer_is_read_the_same_wherever_it_is_split(
    thoughts: object, prompt: str, text: str, thought: str, content: str
) -> None:
    kind = GEMMA if thoughts is GEMMA else THINK
    ends = range(len(text) + 1)
    splits = [list(ends), *([0, one, two, len(text)] for one in ends for two in ends[one:])]
    for split in splits:
        parser = kind.parser(prompt)
        found = [parser.push(text[begin:end]) for begin, end in pairwise(split)]
        found.append(parser.push("", ended=True))
        assert tuple(map("".join, zip(*found, strict=True))) == (thought, content)


def test_thoughts_come_as_soon_as_they_are_certain() -> None:
    parser = THINK.parser("")
    pieces = ["<think>", "\nOne", " ", "two", " <", "a", "\n</", "think>", "\n", "Hi", " "]
    found = [parser.push(piece) for piece in pieces]
    assert found == [("", ""), ("One", ""), ("", ""), (" two", ""), ("", ""), (" <a", ""),
                     ("", ""), ("", ""), ("", ""), ("", "Hi"), ("", " ")]  # fmt: skip


def test_templates_and_special_tokens() -> None:
    assert thoughts_of("<|im_start|>{{ m.content }}") is None
    names = ("<bos>", "<|channel>", "<channel|>", "<|think|>")
    found = thoughts_of("text.split('<channel|>')", names)
    assert found is not None and found.special == ("<|channel>", "<channel|>")
    assert THINK.special == ()
    # A message that named one would be refused when it is sent back.
    parser = found.parser("")
    pieces = [
        "<|channel>",
        "thought",
        "\n",
        "a",
        "<|channel>",
        "b",
        "<channel|>",
        "Hi",
        "<channel|>",
    ]
    assert "|".join(map("/".join, map(parser.push, pieces))) == "/|/|/|a/|/|b/|/|/Hi|/"

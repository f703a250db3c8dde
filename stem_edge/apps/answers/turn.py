"""Turn a conversation into requests to the model; errors name the field at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from stem_edge.apps.answers.events import AnswerEvents
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Request
from stem_edge.text.messages import checked_tools
from stem_edge.text.thoughts import LAST_TOKENS
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.grammar import calls_grammar
from stem_edge.text.tool_calls.parser import CallParser

ToolChoice: TypeAlias = Literal["auto", "none", "required"]


def prepare(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    count: int = 1,
    *,
    grammar_field: str = "grammar",
    tools: Sequence[Mapping[str, Any]] = (),
    choice: ToolChoice = "auto",
    tool_name: str | None = None,
    parallel: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[list[Request], Callable[[], AnswerEvents]]:
    """Return requests for `count` answers to a conversation, and a factory of AnswerEvents.

    messages, tools, choice (tool_choice): as in OpenAI's chat completions. tool_name: the tool that must be
    called. parallel: allow several calls. template_arguments: variables for the chat template.
    grammar_field: the request's field that contains the grammar, for errors. Call the factory once for each
    answer. Raises InputError, RefusalError.
    """
    check_grammar(model, params, grammar_field)
    offered = checked_tools(tools) if choice != "none" else None
    must_call = choice == "required" or tool_name is not None
    if not messages:
        raise RefusalError("messages is empty; give at least one message", "messages")
    if offered and not model.has_chat_template:
        raise RefusalError("this model has no chat template, so it takes no tools", "tools")
    ids = model.chat.ids(messages, offered, template_arguments)
    family = _family(model, params) if offered else None
    if family is not None and offered:
        if must_call:
            lark = calls_grammar(family, offered, name=tool_name, parallel=parallel)
            params = replace(params, grammar=Grammar("lark", lark))
            check_grammar(model, params, "tools")
    elif must_call:
        raise RefusalError("tool_choice demands a call, but tools is empty", "tool_choice")
    # A grammar applies from the first token on, so the answer cannot begin with reasoning.
    thoughts = model.chat.thoughts if params.grammar is None else None
    kept = [*params.kept_special_tokens, *(thoughts.special if thoughts else ())]
    params = replace(params, kept_special_tokens=[*kept, *(family.special if family else ())])
    requests = [model.request(ids, each) for each in seeded(params, count)]
    end = model.detokenize(ids[-LAST_TOKENS:], skip_special_tokens=False)
    return requests, lambda: AnswerEvents(
        thoughts.parser(end) if thoughts is not None else None,
        CallParser(family, offered or ()) if family is not None else None,
    )


def _family(model: Model, params: SamplingParams) -> Family:
    """Return the model's tool-call format. Raises RefusalError if it is unknown, or params has a grammar."""
    if model.tool_family is None:
        raise RefusalError(
            "this model's chat template writes no calls that are known here", "tools"
        )
    if params.grammar is not None:  # applies to the whole answer, so no call fits
        raise RefusalError(
            "both tools and a format of the answer are given (such as response_format); give one of "
            "them, or tool_choice: none",
            "tools",
        )
    return model.tool_family


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return params for `count` answers, with consecutive seeds. Checks and converts nothing again."""
    found = [copy(params) for _ in range(count)]
    for number, each in enumerate(found):
        seed = None if params.seed is None else (params.seed + number) % 2**64
        vars(each).update(seed=seed, biases=params.biases)
    return found


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Context manager that turns InputError into a RefusalError that names the field."""
    try:
        yield
    except InputError as error:
        raise RefusalError(f"{field}: {error}", field) from None


def check_grammar(model: Model, params: SamplingParams, field: str) -> None:
    """Compile and cache the grammar of params, if any. Raises RefusalError that names `field`."""
    if params.grammar is not None:
        with naming(field):
            model.check_grammar(params.grammar)

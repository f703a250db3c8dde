"""A conversation to answer, and how its tokens are chosen, with errors that name the field at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stem_edge.answers.events import AnswerEvents
from stem_edge.answers.refusals import RefusalError
from stem_edge.errors import InputError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.sampling import CONVERSATION
from stem_edge.text.messages import checked_messages, checked_tools
from stem_edge.text.thoughts import LAST_TOKENS, Thoughts
from stem_edge.text.tool_calls.families import Family
from stem_edge.text.tool_calls.grammar import calls_grammar
from stem_edge.text.tool_calls.parser import CallParser

ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Turn:
    """A conversation to answer. Messages and tools are in the form of OpenAI's chat completions."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    grammar_field: str = "grammar"  # that gave the grammar of params, if there is one
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None  # the only one that may be called, and must be
    parallel: bool = True  # whether several calls are allowed
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


class PreparedTurn(NamedTuple):
    """A turn that is rendered, tokenized and can be submitted."""

    requests: list[Request]
    prompt: str  # its end
    thoughts: Thoughts | None  # how they are marked, if there may be some
    family: Family | None = None  # how calls are written, if there may be some
    tools: list[dict[str, Any]] | None = None

    def events(self) -> AnswerEvents:
        """Return what reads one of the answers."""
        return AnswerEvents(
            self.thoughts.parser(self.prompt) if self.thoughts is not None else None,
            CallParser(self.family, self.tools) if self.family is not None else None,
        )


def prepare(model: Model, turn: Turn, count: int = 1) -> PreparedTurn:
    """Render and tokenize a turn, and make its requests. Raises InputError."""
    check_grammar(model, turn.params, turn.grammar_field)
    tools = offered(turn)
    ids = prompt_ids(model, turn, tools)
    params, family = turn.params, model.tool_family if tools else None
    if not tools:
        check_no_call(turn)
    elif family is None:
        raise RefusalError(
            "this model's chat template writes no calls that are known here", "tools"
        )
    else:
        params = with_calls(turn, family, tools)
        check_grammar(model, params, "tools")
    # A grammar holds from the first token on, so it leaves no place for thoughts.
    thoughts = model.chat.thoughts if params.grammar is None else None
    kept = [*params.kept_special_tokens, *(thoughts.special if thoughts else ())]
    kept += family.special if family else ()
    params = replace(params, kept_special_tokens=kept)
    requests = [model.request(ids, each) for each in seeded(params, count)]
    end = model.detokenize(ids[-LAST_TOKENS:], skip_special_tokens=False)
    return PreparedTurn(requests, end, thoughts, family, tools)


def offered(turn: Turn) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call."""
    return checked_tools(turn.tools) if turn.tool_choice != "none" else None


def check_no_call(turn: Turn) -> None:
    """Refuse a turn that demands a call, but offers no tools."""
    if turn.tool_choice == "required" or turn.tool_name is not None:
        raise RefusalError("tool_choice demands a call, but tools is empty", "tool_choice")


def with_calls(turn: Turn, family: Family, tools: list[dict[str, Any]]) -> SamplingParams:
    """Return params that make the model call if the turn demands that, and else let it."""
    if turn.params.grammar is not None:  # which leaves no place for calls
        raise RefusalError(
            "both tools and a format of the answer are given (such as response_format); give one of "
            "them, or tool_choice: none",
            "tools",
        )
    if turn.tool_choice != "required" and turn.tool_name is None:
        return turn.params
    grammar = calls_grammar(family, tools, name=turn.tool_name, parallel=turn.parallel)
    return replace(turn.params, grammar=Grammar("lark", grammar))


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return params for several answers to one prompt: the same, with seeds that follow each other."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + number) % 2**64) for number in range(count)]


def prompt_ids(
    model: Model, turn: Turn, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Return the token ids of a conversation by the bundle's template, else of the joined texts."""
    if not turn.messages:
        raise RefusalError("messages is empty; give at least one message", "messages")
    if not model.has_chat_template:
        if tools:
            raise RefusalError("this model has no chat template, so it takes no tools", "tools")
        return model.tokenize(joined(turn.messages))
    text = model.chat_prompt(turn.messages, tools=tools, template_arguments=turn.template_arguments)
    return model.tokenize(text, add_special_tokens=False, special_tokens_in_text=True)


def joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of messages, one after the other."""
    text = "".join(message["content"] for message in checked_messages(messages))
    if not text:
        raise RefusalError("the messages have no text; give some", "messages")
    return text


T = TypeVar("T")


def params_of(model: Model, names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """Return the sampling params, with what is not given as the model has it. Raises RefusalError.

    names: field of SamplingParams -> its name in the interface, where they differ.
    """
    try:
        return model.chosen(SamplingParams(**fields), CONVERSATION)
    except InputError as error:
        name, _, rest = str(error).partition(" ")
        name = names.get(name, name)
        raise RefusalError(f"{name} {rest}", name) from None


def grammar_of(field: str, make: Callable[[T], Grammar], given: T) -> Grammar:
    """Return the grammar that a field gives. Raises RefusalError."""
    try:
        return make(given)
    except InputError as error:
        raise RefusalError(f"{field}: {error}", field) from None


def check_grammar(model: Model, params: SamplingParams, field: str) -> None:
    """Compile the grammar that a field gave, if any, which is kept. Raises RefusalError."""
    if params.grammar is None:
        return
    try:
        model.check_grammar(params.grammar)
    except InputError as error:
        raise RefusalError(f"{field}: {error}", field) from None

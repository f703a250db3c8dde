"""A request of completions, from its prompts to its answers as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.serving.answers import Whole
from stem_edge.serving.openai.completion_body import CompletionBody
from stem_edge.serving.openai.shapes import head, usage
from stem_edge.serving.params import check_grammar
from stem_edge.serving.token_texts import TokenTexts
from stem_edge.serving.turn import seeded


@dataclass(frozen=True)
class Echo:
    """Text before an answer: nothing, or the prompt."""

    text: str
    found: list[TokenLogprobs | int]  # its tokens, the first without log probabilities


@dataclass(frozen=True)
class Asked:
    """A request that is tokenized and can be submitted: `count` answers to each prompt in turn."""

    body: CompletionBody
    texts: TokenTexts
    requests: list[Request]
    echoes: list[Echo]  # of each prompt
    count: int
    generates: bool  # whether new tokens are asked for

    def choice(
        self,
        number: int,
        text: str,
        found: list[TokenLogprobs] | None = None,
        *,
        first: bool,
        offset: int = 0,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a choice, or a piece of one. first: after the echo. offset: characters before."""
        echo = self.echoes[number // self.count] if first else Echo("", [])
        logprobs, tokens = None, [*echo.found, *(found or ())]
        if tokens:
            logprobs = self.texts.logprobs(tokens, offset)
        text = echo.text + text
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": reason}

    def completion(self, name: str, answers: Sequence[Whole]) -> dict[str, Any]:
        """Return all answers as one object. name: of the model. answers: none if nothing is new."""
        if self.generates:
            found = [(each.text, each.logprobs, each.reason) for each in answers]
        else:
            found = [("", None, "length")] * len(self.requests)
        choices = [
            self.choice(number, text, logprobs, first=True, reason=reason)
            for number, (text, logprobs, reason) in enumerate(found)
        ]
        return head(name, "cmpl", "text_completion") | {
            "choices": choices,
            "usage": usage(self.requests, self.count),
        }


def prepare(
    model: Model,
    texts: TokenTexts,
    body: CompletionBody,
    prompts: Sequence[str | list[int]],
    params: SamplingParams | None,
) -> Asked:
    """Tokenize prompts, and make their requests. params: None for no new tokens. Raises InputError."""
    count, echoes, requests = body.count, list[Echo](), list[Request]()
    if params is not None:
        check_grammar(model, params, body.grammar_field)
    for prompt in prompts:
        each = [model.request(prompt, one) for one in seeded(params or SamplingParams(), count)]
        requests += each
        ids, text = each[0].prompt, ""
        if body.echo:
            text = model.detokenize(ids, skip_special_tokens=False)
            text = prompt if isinstance(prompt, str) else text
        scored = body.echo and body.logprobs is not None
        echoes.append(Echo(text, [ids[0]] if scored else []))
    return Asked(body, texts, requests, echoes, count, params is not None)

"""OpenAI's completions: JSON of requests, responses and streamed chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stem_edge.apps.answers.events import AnswerEvent, End, Text, Whole
from stem_edge.apps.answers.openai.options import Options
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.answers.token_texts import TokenTexts
from stem_edge.apps.answers.turn import check_grammar, seeded
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Request

DEFAULT_TOKENS = 16  # as OpenAI's


class CompletionBody(Options, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt as text or token ids. Raises RefusalError for empty or mixed lists."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [each for each in self.prompt if isinstance(each, int)]
        others = [each for each in self.prompt if not isinstance(each, int)]
        if not self.prompt or (ids and others):
            raise RefusalError(
                "prompt is empty, or mixes token ids with others; give a text, a list of texts, token "
                "ids, or a list of lists of them",
                "prompt",
            )
        return [ids] if ids else others

    def asked(self, model: Model, texts: TokenTexts) -> Asked:
        """Tokenize the prompts. texts: token texts for log probabilities. Raises InputError, RefusalError."""
        echoes, requests, params = list[Echo](), list[Request](), self.sampling(model)
        if params is not None:
            check_grammar(model, params, self.grammar_field)
        for prompt in self.prompts():
            each = seeded(params or SamplingParams(), self.count)
            requests += (asked := [model.request(prompt, one) for one in each])
            ids, text = asked[0].prompt, ""
            if self.echo:
                text = model.detokenize(ids, skip_special_tokens=False)
                text = prompt if isinstance(prompt, str) else text
            scored = self.echo and self.logprobs is not None
            echoes.append((text, [ids[0]] if scored else []))
        return Asked(self, texts, requests, echoes, params is not None)

    def sampling(self, model: Model) -> SamplingParams | None:
        """Return sampling params; None if max_tokens is 0. Raises RefusalError for invalid fields."""
        if self.suffix:
            raise RefusalError("suffix is not supported: this model continues texts", "suffix")
        if self.best_of is not None and self.best_of > max(1, self.count):
            raise RefusalError("best_of is not supported; give n", "best_of")
        most = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        if most < 0:
            raise RefusalError(f"max_tokens is {most}; expected at least 0", "max_tokens")
        held = model.plan.context_length
        params = self.params(model, min(max(most, 1), held), self.logprobs)
        return params if most else None


# (Echoed prompt or "", log probabilities of its tokens, but only the id of the first token).
Echo: TypeAlias = tuple[str, list[TokenLogprobs | int]]


@dataclass(frozen=True)
class Asked:
    """A tokenized completion request, which also formats its answers as JSON.

    echoes: what comes before the answers to a prompt, one for each prompt. generates: False if
    max_tokens is 0. offsets: index of a choice -> number of characters in the texts of its tokens so far.
    """

    body: CompletionBody
    texts: TokenTexts
    requests: list[Request]
    echoes: list[Echo]
    generates: bool
    offsets: dict[int, int] = field(default_factory=dict)
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def choices(self, number: int, piece: AnswerEvent) -> list[dict[str, Any]]:
        """Convert an event of an answer to a choice; the first begins with the echoed prompt."""
        first = number not in self.offsets
        before, tokens = self.echoes[number // self.body.count] if first else ("", [])
        text, found = piece if isinstance(piece, Text) else ("", None)
        tokens, offset = [*tokens, *(found or ())], self.offsets.get(number, 0)
        logprobs = self.texts.logprobs(tokens, offset) if tokens else None
        self.offsets[number] = offset + (sum(map(len, logprobs["tokens"])) if logprobs else 0)
        reason = piece.reason if isinstance(piece, End) else None
        choice = {"text": before + text, "index": number, "logprobs": logprobs}
        return [choice | {"finish_reason": reason}]

    def whole(self, answers: Sequence[Whole]) -> list[dict[str, Any]]:
        """Return a choice for each answer; if max_tokens is 0, choices without new text."""
        pieces = [(Text(each.text, each.logprobs), each.reason) for each in answers]
        if not self.generates:
            pieces = [(Text(""), "length")] * len(self.requests)
        return [
            choice | {"finish_reason": reason}
            for number, (text, reason) in enumerate(pieces)
            for choice in self.choices(number, text)
        ]

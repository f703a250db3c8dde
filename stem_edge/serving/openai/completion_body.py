"""Requests of completions."""

from __future__ import annotations

from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import RANGES, SamplingParams
from stem_edge.serving.openai.options import Options
from stem_edge.serving.refusals import RefusalError

DEFAULT_TOKENS = 16  # as OpenAI's


class CompletionBody(Options, kw_only=True):
    """A request of a completion: of one prompt, or of a list of them."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raises RefusalError."""
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

    def sampling(self, model: Model) -> SamplingParams | None:
        """Return what to sample by; None for no new tokens. Raises RefusalError."""
        if self.suffix:
            raise RefusalError("suffix is not supported: this model continues texts", "suffix")
        if self.best_of is not None and self.best_of > max(1, self.count):
            raise RefusalError("best_of is not supported; give n", "best_of")
        most = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        if most < 0:
            raise RefusalError(f"max_tokens is {most}; expected at least 0", "max_tokens")
        held = model.plan.context_length
        params = self.params(min(max(most, 1), held), self._top())
        return params if most else None

    def _top(self) -> int | None:
        least, most = RANGES["logprobs"]
        if self.logprobs is not None and not least <= self.logprobs <= most:
            raise RefusalError(
                f"logprobs is {self.logprobs}; expected {least} to {most}", "logprobs"
            )
        return self.logprobs

"""A bundle as a model of EleutherAI's lm-evaluation-harness (lm_eval), under the name stem_edge.

    import lm_eval
    from stem_edge.measuring.quality.lm_eval import StemEdgeLM

    with StemEdgeLM("model", memory="600MB") as model:
        results = lm_eval.simple_evaluate(model, tasks=["arc_easy"])

or `stem-edge lm-eval run --tasks arc_easy --model_args bundle=model,memory=600MB`. The harness finds
models only in its own list, to which importing this module adds.

The harness leaves these choices open:
- The begin token stands before a text if and only if the model was trained with it, and never
  twice. A text that is scored from its first token follows the begin token, or else the end token.
- Texts longer than the context lose their beginning, as with the harness's own models.
- Sampling is reproducible: the seed of a request is its number, plus `seed` if one was given.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import fsum
from pathlib import Path
from typing import Any, Self

import lm_eval.models  # noqa: F401  first, because the harness only fills an empty list of models
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from stem_edge.bundle.manifest import TOKENIZER, TOKENIZER_CONFIG
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.quality.lm_eval_options import (
    converted,
    load_options,
    sampling_params,
    sequences,
)
from stem_edge.runtime import SamplingParams, load
from stem_edge.runtime.backends.planner import USUAL_CONTEXT
from stem_edge.runtime.scoring import Scorer
from stem_edge.text.chat_template import read_template

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # context and continuation: text, ids
Message = dict[str, str]  # role and content
Job = tuple[list[int], SamplingParams]  # a prompt to continue

DEFAULT_NEW_TOKENS = 256  # as in the harness's own models

log = logging.getLogger(__name__)


@register_model("stem_edge")
class StemEdgeLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A loaded bundle; close it, or use it as a context manager.

    bundle: folder that stem-edge export wrote.
    max_gen_toks: tokens to generate if a task does not say; default 256, or half of the context.
    reuse: False computes every request from its beginning, to compare with.
    options: of stem_edge.load, by the same names; texts are converted. context_length is 4096 by
        default, or the model's if that is shorter.
    batch_size: texts to generate at a time, "auto" for 8 or max_batch_size; the harness passes 1 if it
        is not told. The option `sequences` of load comes first. Several at a time can differ from one
        where two tokens are almost as probable. Scores of given texts do not depend on it: they are
        computed like prompts, whose chunks hold many tokens anyway.
    The harness passes the other arguments to every model; they change nothing, because the
    `providers` of stem_edge.load compute.

    Raises InputError for options that are unknown or wrong, and what stem_edge.load raises.
    """

    def __init__(
        self,
        bundle: str | Path | None = None,
        *,
        max_gen_toks: int | str | None = None,
        reuse: bool | str = True,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: object = None,
        trust_remote_code: object = None,
        **options: object,
    ) -> None:
        super().__init__()
        if bundle is None:
            raise InputError("no bundle; give bundle=FOLDER among the model's arguments")
        loading = load_options(options)
        if loading.get("context_length") is None:  # results depend on it, so memory must not choose
            later = loading.get("tables_later", False)
            opened = open_bundle(bundle, loading.get("tables"), tables_later=later)
            bundle, longest = opened.path, opened.manifest.model.max_context
            loading["context_length"] = min(longest, USUAL_CONTEXT)
        self._sequences = loading.setdefault("sequences", sequences(batch_size, max_batch_size))
        self.model = load(str(bundle), **loading)
        self.model._text.room = None  # documents of tasks are longer than any prompt
        # A finalizer, because the harness does not close models.
        self._finalize = weakref.finalize(self, self.model.close)
        self._scorer = Scorer(self.model, reuse=converted("reuse", reuse, bool))
        self._max_new = converted("max_gen_toks", max_gen_toks, int | None) or min(
            DEFAULT_NEW_TOKENS, self.max_length // 2
        )
        plain = self.model.tokenize("a", add_special_tokens=False)
        self._begin = self.model.tokenize("a")[: -len(plain)]

    @property
    def max_length(self) -> int:
        """Tokens that the context holds."""
        return self.model.plan.context_length

    @property
    def eot_token_id(self) -> int | None:
        """Id of the end-of-text token."""
        return next(iter(self.model.config.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token from which the first token of a text is predicted."""
        for token in (*self._begin, self.model.config.bos_id, self.eot_token_id):  # as HFLM has it
            if token is not None:
                return token
        raise InputError(
            f"{self.model.bundle.path} has neither begin nor end token, so the first token of a "
            "text cannot be predicted; choose a task that gives every text a context"
        )

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches the requests that it has built."""
        return f"stem_edge-{self.model.bundle.manifest.files[TOKENIZER].sha256}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return token ids; by default after one begin token, if the model was trained with it."""
        ids = self.model.tokenize(string, add_special_tokens=False, special_tokens_in_text=True)
        if add_special_tokens is False or ids[: len(self._begin)] == self._begin:
            return ids
        return self._begin + ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Return (log probability, whether it is the greedy choice) of each continuation, in order."""
        # A context can be empty, because the harness moves its trailing spaces to the continuation.
        pairs = [(context or [self.prefix_token_id], rest) for _, context, rest in requests]
        lengths = [len(context) + len(rest) - 1 for context, rest in pairs]
        if cut := sum(length > self.max_length for length in lengths):
            log.warning(
                "%d of %d requests are longer than the context of %d tokens and lose their "
                "beginning; the longest has %d",
                *(cut, len(lengths), self.max_length, max(lengths)),
            )
        answers: dict[int, tuple[float, bool]] = {}
        scores = self._scorer.scores(pairs)
        for number, score in tqdm(scores, "Scoring", len(pairs), disable=disable_tqdm):
            answers[number] = (score.logprob, score.greedy)
            if (texts := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log probability of each text from its first token on, in windows of a context."""
        windows, ends = list[Encoded](), [0]
        for request in requests:
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0])[len(self._begin) :],
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(window)) for window in found]
            ends.append(len(windows))
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = []
        for request, start, end in zip(requests, ends[:-1], ends[1:], strict=True):
            totals.append(fsum(logprob for logprob, _ in scores[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to one of `until`, in order."""
        jobs = [self._job(number, *request.args) for number, request in enumerate(requests)]
        texts: dict[int, str] = {}
        found = tqdm(self._texts(jobs), "Generating", len(jobs), disable=disable_tqdm)
        for number, texts[number] in found:
            self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return [texts[number] for number in range(len(jobs))]

    def _texts(self, jobs: Sequence[Job]) -> Iterator[tuple[int, str]]:
        """Yield (number, text) of each job as soon as it has ended."""
        if self._sequences == 1:
            for number, (prompt, params) in enumerate(jobs):
                yield number, self.model.generate_text(prompt, params)
            return
        texts, prompts = [""] * len(jobs), [prompt for prompt, _ in jobs]
        every = [params for _, params in jobs]
        many = self.model.generate_many(prompts, every, sequences=self._sequences)
        with closing(many):
            for number, chunk in many:
                if chunk.error is not None:
                    raise chunk.error
                texts[number] += chunk.text
                if chunk.finish_reason is not None:
                    yield number, texts[number]

    def _job(self, number: int, context: str, options: Mapping[str, Any]) -> Job:
        """Return prompt and sampling of a request, checked."""
        params = sampling_params(options, self._max_new, number)
        room = self.max_length - params.max_new_tokens
        if room < 1:
            raise InputError(
                f"a task asks for up to {params.max_new_tokens} new tokens, but the context holds "
                f"{self.max_length} with the prompt; give a larger context_length (this model takes "
                f"up to {self.model.config.max_context}) or --gen_kwargs max_gen_toks=N"
            )
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:], params

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; without a prompt, it ends in the last message."""
        text = self.model.chat_prompt(
            chat_history, add_generation_prompt, special_tokens_in_text=True
        )
        return text if add_generation_prompt else without_end(text, chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template itself, which the harness notes in its results."""
        path = self.model.bundle.file(TOKENIZER_CONFIG)
        return read_template(path)[0] if chat_template else ""

    def close(self) -> None:
        """Release memory, threads and files; may be called more than once."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def without_end(text: str, messages: Sequence[Message]) -> str:
    """Cut a conversation's text after the content of the last message, so that it can go on."""
    last = messages[-1]["content"].strip()
    return text[: text.rfind(last) + len(last)] if last in text else text

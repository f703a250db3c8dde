"""Request options and response fields that completions and chat completions share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

import stem_edge
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.answers.turn import naming
from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Request
from stem_edge.sampling import CONVERSATION

MOST_NBYTES = 4 << 20  # of a request, and of a row of a batch
MOST_DIGITS = 10  # of a token id; Python refuses to parse much longer numbers
MOST_ANSWERS = 128  # as OpenAI allows
MOST_LOGPROBS = 20  # for each token, as OpenAI allows in chats
SMALLEST_TOP_P = 1e-9  # in place of 0, which OpenAI allows: only the top token
# Refused field -> what to give instead. To ignore these fields would change the answer.
REFUSED = {
    name: instead
    for instead, names in {
        "max_tokens": "max_new_tokens n_predict num_predict t_max_predict_ms",
        "its fields as fields of the request": "options",
        "--context-length to stem-edge serve": "num_ctx",
        "response_format or json_schema": "schema format structured_outputs structural_tag",
        "guided_regex": "regex guided_choice",
        "tools and tool_choice": "functions function_call",
        "a message of the user that asks for the rest": "continue_final_message",
        "temperature, top_p, top_k or min_p": "mirostat typical_p top_n_sigma dynatemp_range "
        "xtc_probability samplers use_beam_search length_penalty",
        "repetition_penalty": "repeat_last_n dry_multiplier",
        "stop": "stop_token_ids include_stop_str_in_output",
        "logit_bias": "ignore_eos min_tokens bad_words allowed_token_ids",
        "logprobs": "n_probs prompt_logprobs",
        "chat_template_kwargs": "think",
        "a message whose role is system": "system",
        "the whole text to /v1/completions": "raw template chat_template",
        "texts": "modalities audio images image_data",
    }.items()
    for name in names.split()
}
OFF: Sequence[Any] = (False, "", [], {})  # values of other fields than HARMLESS that change nothing
HARMLESS = {"think": (), "typical_p": (1,), "length_penalty": (1,), "modalities": (["text"],)}
RefusedFields = msgspec.defstruct("RefusedFields", [(name, Any, None) for name in REFUSED])
DONE = b"data: [DONE]\n\n"
# Field of a request -> function that converts its value to a grammar.
GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "grammar": Grammar.of_text,
    "json_schema": Grammar.of_schema,
    "guided_json": Grammar.of_schema,
    "guided_regex": Grammar.of_regex,
    "guided_grammar": Grammar.of_text,
}


class Options(msgspec.Struct):
    """Request fields of completions and of chats. Unknown fields are ignored, as by OpenAI.

    Fields after `stream_options` come from llama.cpp and vLLM, not from OpenAI.
    """

    logprobs_field: ClassVar[str] = "logprobs"  # name of the field with their number
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    timings_per_token: bool | None = None

    @property
    def count(self) -> int:
        """Number of answers to each prompt (`n`). Raises RefusalError if it is out of range."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MOST_ANSWERS:
            raise RefusalError(f"n is {count}; expected 1 to {MOST_ANSWERS}", "n")
        return count

    @property
    def with_usage(self) -> bool:
        """True if the client wants token counts at the end of the stream."""
        return (self.stream_options or {}).get("include_usage") is True

    def params(self, model: Model, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return sampling params; absent fields get the model's defaults. Raises RefusalError.

        logprobs: number of top tokens whose log probabilities are returned; None: no log probabilities.
        """
        if self.stream_options is not None and not self.stream:
            raise RefusalError("stream_options is for streams; set stream, too", "stream_options")
        if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
            name, most = self.logprobs_field, MOST_LOGPROBS
            raise RefusalError(f"{name} is {logprobs}; expected 0 to {most}", name)
        penalty = self.repetition_penalty
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else biases(self.logit_bias),
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "top_k": self.top_k and max(self.top_k, 0),  # -1: off, as vLLM says
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty if penalty is None else penalty,
            "logprobs": logprobs,
            "grammar": self.answer_grammar(),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            params = SamplingParams(max_new_tokens=max_new_tokens, **given)
            return model.chosen(params, CONVERSATION)
        except InputError as error:
            raise RefusalError(str(error), str(error).split()[0]) from None

    @property
    def grammar_field(self) -> str:
        """Name of the field that restricts the answer's format; default: response_format."""
        given = (name for name in GRAMMARS if getattr(self, name) not in (None, ""))
        return next(given, "response_format")

    def answer_grammar(self) -> Grammar | None:
        """Return the grammar that answers must follow, if any. Raises RefusalError if two are given."""
        found = {
            "response_format": _schema_of(self.response_format or {}),
            **{name: getattr(self, name) for name in GRAMMARS},
        }
        given = {name: each for name, each in found.items() if each not in (None, "")}
        if len(given) > 1:
            raise RefusalError(f"give only one of {' and '.join(given)}", list(given)[-1])
        if not given:
            return None
        ((name, each),) = given.items()
        with naming(name):
            return GRAMMARS.get(name, Grammar.of_schema)(each)


def refuse(fields: msgspec.Struct) -> None:
    """Raise RefusalError for the first of `fields`, a RefusedFields, that would change the answer."""
    for name, instead in REFUSED.items():
        if (value := getattr(fields, name)) is not None and value not in HARMLESS.get(name, OFF):
            raise RefusalError(f"{name} is not supported here; give {instead}", name)


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """Convert keys of a logit_bias from str to token ids. Raises RefusalError for other strings."""
    if wrong := [key for key in given if not key.isdecimal() or len(key) > MOST_DIGITS]:
        raise RefusalError(f"logit_bias has {wrong[0][:80]!a}; expected token ids", "logit_bias")
    return {int(key): value for key, value in given.items()}


def _schema_of(given: Mapping[str, Any]) -> object:
    """Return a response_format's JSON Schema; None for plain text. Raises RefusalError if unknown."""
    match given:
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
        case {"type": "json_object"}:
            return given.get("schema") or {"type": "object"}  # llama.cpp's clients send a schema
    if not given or given.get("type") == "text":
        return None
    raise RefusalError(
        f"response_format.type is {given.get('type')!a}; expected text, json_object, or json_schema "
        "with json_schema.schema",
        "response_format",
    )


def head(model_name: str, id_prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that begin every response and every streamed chunk."""
    return {
        "id": f"{id_prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
        "system_fingerprint": f"b{stem_edge.__version__}",
    }


def usage(requests: Sequence[Request], count: int = 1) -> dict[str, Any]:
    """Return token counts in OpenAI's form. A prompt with `count` answers is counted once."""
    prompt = sum(request.prompt_tokens for request in requests[::count])
    cached = sum(request.cached_tokens for request in requests[::count])
    new = sum(request.new_tokens for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

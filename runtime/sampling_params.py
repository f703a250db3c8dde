"""Sampling parameters: options for choosing tokens and for stopping, with checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Self, TypedDict, cast

import numpy as np

from stem_edge import sampling
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.shown import check_known, shown

if TYPE_CHECKING:
    from stem_edge.runtime.grammars.grammar import Grammar
else:
    Grammar = object  # so that others can read the types of the fields without the grammars

MAX_STOPS, MAX_STOP_CHARS = 64, 1024
# If the limits are integers, only whole numbers are allowed.
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2**31 - 1),
    **sampling.RANGES,
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 1024),
}
# What to do instead of values that mean "no limit" or "random" to other programs.
INSTEAD = {
    "max_new_tokens": "; a large number fills the context",
    "top_k": "; 0 is all",
    "seed": "; leave it out for a random one",
}
OPTIONAL = ("seed", "logprobs", *sampling.RANGES)
MOST_BIAS = 100.0  # more than the logits of any two tokens differ


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments.

    At most one of these may be set: schema (a JSON Schema, or its text), regex, grammar (Lark or GBNF).
    """

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: Sequence[str]
    seed: int | None
    logprobs: int | None
    skip_special_tokens: bool
    kept_special_tokens: Sequence[str]
    grammar: Grammar | str | None
    schema: Mapping[str, Any] | bool | str | None
    regex: str | None


@dataclass(frozen=True)
class SamplingParams:
    """Options for choosing tokens and for stopping. Raises InputError for values out of range.

    max_new_tokens: stop after this many tokens. Default: 128.
    temperature: 0 takes the most probable token, 1 samples as trained. With 0, the model's own values of
        other options are not used. Default: the model's own. If it has none: 1 if `top_k`, `top_p` or
        `min_p` restricts the choice, else 0.
    top_k: choose among this many most probable tokens. Default: the model's own, else 0, which means all.
    top_p: choose among the most probable tokens whose probabilities add up to this. Default: the model's
        own, else 1, which means all.
    min_p: choose among tokens with at least this fraction of the highest probability. Default: the model's
        own, else 0, which means all.
    repetition_penalty: above 1, tokens seen before are less probable. It divides positive logits and
        multiplies negative ones. Default: the model's own, else 1.
    presence_penalty: subtracted once from the logits of tokens that the answer already has. Tokens of the
        prompt do not count. Below 0, it makes these tokens more probable. Default: 0.
    frequency_penalty: like `presence_penalty`, but subtracted once per occurrence of the token. Default: 0.
    logit_bias: map of token id to a number from -100 (never) to 100, which is added to its logit.
    stop: one or more texts. The answer ends before the first of them.
    seed: the same seed gives the same text. Default: a new random seed each time.
    logprobs: report this many of the most probable tokens of each step.
    skip_special_tokens: leave out the names of special tokens. The end token is always left out. Default: yes.
    kept_special_tokens: names of special tokens that are not left out.
    grammar: restricts the text of the answer.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: Sequence[str] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not (_in_range(value, least, most) or (value is None and name in OPTIONAL)):
                kind = "a whole number" if isinstance(most, int) else "a number"
                raise _refused(name, value, f"{kind} from {least} to {most}{INSTEAD.get(name, '')}")
        if self.top_p == 0:
            raise _refused("top_p", self.top_p, "a number above 0, up to 1.0")
        self._check_others()

    @property
    def greedy(self) -> bool:
        """True if each token is the most probable one, and nothing changes the probabilities."""
        changes = self.presence_penalty, self.frequency_penalty, self.logit_bias
        return self.temperature == 0 and self.repetition_penalty == 1 and not any(changes)

    @cached_property
    def biases(self) -> tuple[I64, F32]:
        """Token ids and numbers of logit_bias."""
        given = self.logit_bias
        return np.fromiter(given.keys(), np.int64), np.fromiter(given.values(), np.float32)

    def resolved(self, own: Mapping[str, float] = {}, otherwise: Mapping[str, float] = {}) -> Self:
        """Return a copy in which numbers replace None: the model's own values, or else neutral values.

        own: field -> the model's value. otherwise: more such values, for models without a temperature of their own.
        If the temperature is already 0, neither is used. A temperature that is still missing becomes 1 if a filter
        such as top_k is set, else 0.
        """
        fields = {name: getattr(self, name) for name in sampling.RANGES}
        given = {name: value for name, value in fields.items() if value is not None}
        if len(given) == len(fields):
            return self
        neutral, said = sampling.NEUTRAL, dict[str, Any]()
        if self.temperature != 0:
            said = {**({} if "temperature" in own else otherwise), **own}
        said |= given
        filtered = any(said.get(name, neutral[name]) != neutral[name] for name in sampling.FILTERS)
        return replace(self, **({"temperature": 1.0 if filtered else 0.0} | neutral | said))

    def _check_others(self) -> None:
        texts = f"a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
        biases = f"numbers from {-MOST_BIAS} to {MOST_BIAS} by token id"
        for name, right, expected in (
            ("stop", _are_texts(self.stop), texts),
            ("kept_special_tokens", _are_texts(self.kept_special_tokens), texts),
            ("logit_bias", _are_biases(self.logit_bias), biases),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "True or False"),
            ("grammar", self.grammar is None or _is_grammar(self.grammar), "a Grammar"),
        ):
            if not right:
                raise _refused(name, getattr(self, name), expected)


def params_of(params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
    """Return `params`, or SamplingParams made from options. Raises InputError if both are given."""
    if params is not None and options:
        raise InputError("give either params or single options, not both")
    check_known(options, list(SamplingOptions.__annotations__))
    if params is not None:
        return params
    fields = cast("dict[str, Any]", options.copy())
    if fields.keys() & {"grammar", "schema", "regex"}:
        from stem_edge.runtime.grammars.grammar import grammar_of

        given = (fields.pop(name, None) for name in ("grammar", "schema", "regex"))
        fields["grammar"] = grammar_of(*given)
    return SamplingParams(**fields)


def _is_grammar(value: object) -> bool:
    from stem_edge.runtime.grammars.grammar import Grammar

    return isinstance(value, Grammar)


def _in_range(value: object, least: float, most: float) -> bool:
    """True if a value is a number in range: an int if the limits are ints, and never a bool."""
    wanted = Integral if isinstance(most, int) else Real
    if not isinstance(value, wanted) or isinstance(value, bool):
        return False
    return bool(least <= value <= most)  # type: ignore[operator]  # Real has no order


def _are_texts(stop: object) -> bool:
    if not isinstance(stop, Sequence) or isinstance(stop, str | bytes) or len(stop) > MAX_STOPS:
        return False
    return all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in stop)


def _are_biases(biases: object) -> bool:
    return isinstance(biases, Mapping) and all(
        _in_range(token, 0, 2**31 - 1) and _in_range(bias, -MOST_BIAS, MOST_BIAS)
        for token, bias in biases.items()
    )


def _refused(name: str, value: object, expected: str) -> InputError:
    return InputError(f"{name} is {shown(value)}; expected {expected}")

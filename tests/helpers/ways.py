"""Ways of running a model that must give its answers: through load, generate, logits and HTTP alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import printable
from typing import Any

import models
import numpy as np
from guessing import Told
from models import DEVICE, Kind
from oracle import Answer, Oracle, RowOf
from servers import client_of, compute_of, wait_for

import stem_edge
from stem_edge.apps.serving import app
from stem_edge.bundle.edit_files.file import Edit, tables_id
from stem_edge.errors import InputError
from stem_edge.numerics.distributions import divergence
from stem_edge.runtime import Model
from stem_edge.runtime.lookups.overlay import BEFORE

NEW = 24


@dataclass(frozen=True)
class Case:
    """A model on an engine, and a folder to write to."""

    name: str
    engine: str
    shared: Path  # with the exports of the session
    folder: Path
    oracle: Oracle

    @property
    def kind(self) -> Kind:
        return models.KINDS[self.name]

    @property
    def path(self) -> Path:
        return models.bundle_of(self.name, self.engine, self.shared)

    @property
    def prompts(self) -> list[list[int]]:
        return models.prompts(self.name)

    @contextmanager
    def load(self, **options: Any) -> Iterator[Model]:
        """Load the bundle for the engine, with one thread if nothing else is said."""
        more: dict[str, Any] = {"threads": 1, "speculate": False}
        more |= {"device_memory": "4GB"} if self.engine == DEVICE else {"engine": self.engine}
        with stem_edge.load(self.path, **(more | options)) as model:
            yield model

    def check(self, prompt: Sequence[int], answer: Answer, *given: Any, **options: Any) -> None:
        """Check an answer that was not cut short."""
        ended = answer.reason == "stop" and answer.ids[-1] in self.ends
        assert len(answer.ids) == NEW or ended, answer
        self.oracle.check(prompt, answer, *given, **options)

    @property
    def ends(self) -> tuple[int, ...]:
        return stem_edge.open_bundle(self.path).manifest.model.eos_ids


def answered(model: Model, prompt: Sequence[int], **options: Any) -> Answer:
    """Return the whole greedy answer to a prompt."""
    found = Answer()
    for chunk in model.generate(prompt, **{"max_new_tokens": NEW, "logprobs": 1} | options):
        found.add(chunk)
    return found


def many(model: Model, prompts: Iterable[Sequence[int]], **options: Any) -> dict[int, Answer]:
    """Return the answers of prompts that decode together, by their numbers."""
    found: dict[int, Answer] = {}
    given: Any = prompts
    for number, chunk in model.generate_many(given, **options):
        found.setdefault(number, Answer()).add(chunk)
    return found


def logits(case: Case) -> None:
    """In one array and in pieces."""
    with case.load() as model:
        for ids in case.prompts:
            whole = model.logits(ids)
            case.oracle.near(whole, ids)
            pieces = [piece.copy() for piece in model.logits_chunks(ids)]
            assert np.array_equal(np.concatenate(pieces), whole)


def alone(case: Case) -> None:
    with case.load() as model:
        for ids in case.prompts:
            found = answered(model, ids)
            case.check(ids, found)
            assert (model.stats.new_tokens, model.stats.sequences) == (len(found.ids), 1)
            assert model.stats.prompt_tokens == len(ids)


def beside(case: Case) -> None:
    """Sequences join and leave a batch of three at different steps."""
    texts = [*case.prompts, *case.prompts[::-1], case.prompts[0][5:]]
    lengths = [NEW, 3, NEW, 9, 1, NEW, 5, NEW, NEW]
    params = [stem_edge.SamplingParams(max_new_tokens=n, logprobs=1) for n in lengths]
    with case.load(sequences=3) as model:
        found = many(model, iter(texts), params=params, sequences=3)
        assert (model.stats.tokens_per_step > 1.3) == (case.engine != DEVICE)
    for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        ids = found[number].ids
        assert len(ids) == length or ids[-1] in case.ends
        case.oracle.check(text, found[number])


def kept(case: Case) -> None:
    """The second prompt is the first with its answer and more; the others begin like them."""
    with case.load() as model:
        long = max(case.prompts, key=len)
        short = long[-200:]  # which no window has left
        first = [*short[:-3], 20, 21, 22]
        one = answered(model, first)
        case.check(first, one)
        for text in ([*first, *one.ids[:20], 23, 24, 25], short, first):
            case.check(text, answered(model, text))
            # ggml goes on after whole steps alone.
            assert case.engine != models.ORT or model.stats.cached_tokens > 100, model.stats
        for text in (long, [*long, 23, 24, 25], long):
            case.check(text, answered(model, text))
        model.forget_prefixes()
        case.check(first, answered(model, first))
        assert model.stats.cached_tokens == 0


def restarted(case: Case) -> None:
    """A later process, with two threads, finds what the first has prepared, and which rows it used."""
    found = []
    for _ in range(2):
        with case.load(threads=2) as model:
            found.append([answered(model, ids) for ids in case.prompts])
    assert found[0] == found[1]
    for ids, answer in zip(case.prompts, found[0], strict=True):
        case.check(ids, answer)


def from_file(case: Case) -> None:
    text, cached = [*max(case.prompts, key=len)[-140:], *range(30, 70)], []
    for _ in range(2):
        with case.load(prompt_cache=case.folder / "prompts") as model:
            case.check(text, answered(model, text))
            cached.append(model.stats.cached_tokens)
    assert cached[0] == 0 and cached[1] > len(text) // 2


def drafted(case: Case) -> None:
    """Every third draft is wrong."""
    told = Told()
    with case.load(speculate=told) as model:
        drafts = right = 0
        for ids in case.prompts:
            told.tell(())
            plain = answered(model, ids)
            told.tell([*ids, *plain.ids], 3)
            case.check(ids, answered(model, ids))
            drafts += model.stats.drafted_tokens
            right += model.stats.accepted_tokens
        assert drafts > right > 10


def forced(case: Case) -> None:
    """A grammar allows one text: each step has the log probabilities of the reference."""
    text = "Kim, 42, met a dog in 1999."
    with case.load() as model:
        for ids in case.prompts[:2]:
            found = answered(model, ids, regex=re.escape(text), max_new_tokens=99)
            assert found.text == text and found.reason == "stop" and len(found.ids) > 5
            logits = case.oracle.reference.logits([*ids, *found.ids])[len(ids) - 1 : -1]
            logits = logits - logits.max(axis=1, keepdims=True)
            expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            chosen = expected[np.arange(len(found.ids)), found.ids]
            assert np.abs(chosen - found.logprobs).max() < 2 * case.kind.tolerance


def edited(case: Case) -> None:
    """Texts of tokens, also of those that the model writes itself, look up each other's rows."""
    with case.load() as model:
        bundle, told = model.bundle, [answered(model, ids).ids for ids in case.prompts[:2]]
        pieces = [*map(model.detokenize, ([t] for ids in told for t in ids)), *printable]

        def last(text: str) -> int:
            return model.tokenize(text, add_special_tokens=False)[-1]

        def is_token(text: str) -> bool:
            back = {model.detokenize([last(before + text)]).strip() for before in BEFORE}
            return text.isprintable() and "\ufffd" not in text and back == {text}

        texts = [text for text in dict.fromkeys(map(str.strip, pieces)) if text and is_token(text)]
        del texts[30:]  # what a context holds
        made_for, layers = tables_id(bundle), bundle.manifest.model.stem_layers
        edits, swap = list[Edit](), dict[int, int]()
        for one, other in zip(texts, [*texts[1:], texts[0]], strict=True):
            options: Any = {"layers": layers, "scope": "everywhere"}
            edits.append(Edit(made_for=made_for, source=one, target=other, **options))
            places = reversed(BEFORE)  # of two places, the first decides
            swap |= {last(before + one): last(before + other) for before in places}
        for ids in case.prompts[:2]:
            text = [*ids, *swap, *ids[-3:]]
            with model.edited(*edits):
                found = answered(model, text)
            case.check(text, found, [swap.get(t, t) for t in [*text, *found.ids]])
            case.check(text, answered(model, text))


def other_rows(case: Case) -> None:
    ends = case.ends
    with case.load() as model:
        for ids in case.prompts:
            row_of: RowOf = [t if t in ends else (7 * t + 3) % 240 for t in ids]
            given: Any = row_of
            case.oracle.near(model.logits(ids, stem_ids=given), ids, row_of)
            case.check(ids, answered(model, ids, stem_ids=given), row_of)


def few_slots(case: Case) -> None:
    """As few rows in memory as a refusal says that it takes."""
    try:
        with case.load(slots=1, sequences=3):
            raise AssertionError("one slot was enough")
    except InputError as error:
        (fewest,) = map(int, re.findall(r"expected (\d+) to", str(error)))
    with case.load(slots=fewest, sequences=3) as model:
        for ids in case.prompts:
            case.check(ids, answered(model, ids))
            case.oracle.near(model.logits(ids), ids)
        assert model.stats.row_misses > 0
        found = many(model, case.prompts, max_new_tokens=NEW, logprobs=1, sequences=3)
    for number, ids in enumerate(case.prompts):
        case.check(ids, found[number])


MOST_NATS = {"int8": 2e-2, "int4": 0.4}  # logits that are all alike have 0.7 or more


def types_of_keys(case: Case) -> None:
    for kv, most in MOST_NATS.items():
        if case.engine in case.kind.kv:
            with case.load(kv=kv) as model:
                assert model.plan.kv == kv
                for ids in case.prompts[::2]:
                    expected = case.oracle.reference.logits(ids)
                    found = divergence(expected, model.logits(ids)).mean()
                    assert found < most + case.kind.nats, (kv, found)
                alone = [answered(model, ids).ids for ids in case.prompts]
                assert alone == [answered(model, ids).ids for ids in case.prompts]


def two_callers(case: Case) -> None:
    """Two threads generate while a third runs a batch."""
    found: dict[tuple[int, int], Answer] = {}
    with case.load(sequences=2) as model:

        def work(caller: int) -> None:
            for number, ids in enumerate(case.prompts):
                found[caller, number] = answered(model, ids)

        def batch() -> None:
            options: Any = {"max_new_tokens": NEW, "logprobs": 1, "sequences": 2}
            for number, answer in many(model, case.prompts, **options).items():
                found[2, number] = answer

        threads = [threading.Thread(target=work, args=(caller,)) for caller in range(2)]
        threads.append(threading.Thread(target=batch))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3 * len(case.prompts)
    for (_, number), answer in found.items():
        case.check(case.prompts[number], answer)


def over_http(case: Case) -> None:
    """All prompts in one request, which decode together; and one as a stream."""
    with case.load(sequences=4) as model:
        plain = [answered(model, ids) for ids in case.prompts]
        body = {"prompt": case.prompts, "max_tokens": NEW, "logprobs": 1, "temperature": 0}
        with client_of(program := app(model, name="m")) as client:
            wait_for(lambda: compute_of(program).loaded is not None)
            reply = client.post("/v1/completions", json=body | {"model": "m"}).json()
            one = body | {"prompt": case.prompts[0], "stream": True, "logprobs": None}
            stream = client.post("/v1/completions", json=one).text
    for ids, answer, choice in zip(case.prompts, plain, reply["choices"], strict=True):
        case.check(ids, answer)
        assert choice["text"] == answer.text and choice["finish_reason"] == answer.reason
        logprobs = np.array(choice["logprobs"]["token_logprobs"])
        assert np.abs(logprobs - answer.logprobs).max() < 2 * case.kind.tolerance
    assert stream.endswith("data: [DONE]\n\n")


ANY: dict[str, Callable[[Case], None]] = {
    "logits": logits,
    "alone": alone,
    "beside others": beside,
    "kept prompt": kept,
    "restarted": restarted,
    "drafts": drafted,
    "2 callers": two_callers,
    "HTTP": over_http,
}
FORCED = {"forced": forced}
WITH_ROWS = {"few slots": few_slots}
WITH_EDITS = {"edited": edited, "other rows": other_rows}
ON_CPU = {"prompt file": from_file, "kv types": types_of_keys}
WAYS = ANY | FORCED | WITH_ROWS | WITH_EDITS | ON_CPU


def ways_of(name: str, engine: str) -> list[str]:
    """Return the ways in which a model can run on an engine."""
    found = [*ANY, *([] if name in ("dense", "gemma3") else WITH_ROWS)]
    found += [] if name.startswith("gemma") else FORCED  # whose tokens have no bytes of their own
    found += WITH_EDITS if models.KINDS[name].edits else []
    return found + ([] if engine == DEVICE else [*ON_CPU])

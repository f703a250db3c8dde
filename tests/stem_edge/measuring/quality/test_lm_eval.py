"""The real lm-evaluation-harness with the demo; tasks are local, nothing is downloaded."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from installed import DEMO

from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.runtime.rows.prefetch import Prefetcher

lm_eval = pytest.importorskip("lm_eval")

from lm_eval import tasks as harness_tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from stem_edge.measuring.quality.lm_eval import StemEdgeLM, without_end
from stem_edge.measuring.quality.lm_eval_options import sampling_params

CAPITALS = {"Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo", "France": "Paris"}
CHOICES = list(CAPITALS.values())
TEXTS = ["The capital of Peru is Lima. It is a country in South America.", "Spain borders France."]

TASKS = {
    "capitals": """
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{capital}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DOCUMENTS: dict[str, list[dict[str, object]]] = {
    "capitals": [
        {"country": country, "choices": CHOICES, "label": number}
        for number, country in enumerate(CAPITALS)
    ],
    "texts": [{"text": text} for text in TEXTS],
    "answers": [{"country": one, "capital": other} for one, other in CAPITALS.items()],
}
# Of a sum: see tests/runtime/test_scoring.py.
TOLERANCE = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tasks as a user writes them, over local files, without network."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS[name]))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
            f"test_split: test\n{text}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield folder


@pytest.fixture
def own_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the harness's own tasks, because listing thousands of them takes 20 seconds."""
    quick = functools.partial(harness_tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(harness_tasks, "TaskManager", quick)


@pytest.fixture
def model() -> Iterator[StemEdgeLM]:
    with StemEdgeLM(DEMO, memory="2GB") as loaded:
        yield loaded


def log_probabilities(model: StemEdgeLM, ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, from the logits of every position."""
    # Pad for the graph for prompts, and to an even number; this changes no earlier logits.
    padded = ids + ids[-1:] * (8 + len(ids) % 2)
    logits = model.model.logits(padded).astype(np.float64)[: len(ids) - 1]
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(row[token]) for row, token in zip(logs, ids[1:], strict=True)]


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def ask(model: StemEdgeLM, *arguments: tuple[str, str]) -> list[tuple[float, bool]]:
    asked = requests("loglikelihood", *arguments)
    answers: list[tuple[float, bool]] = model.loglikelihood(asked, disable_tqdm=True)
    return answers


@pytest.mark.slow
def test_the_harness_evaluates_the_demo_model(model: StemEdgeLM, folder: Path) -> None:
    manager = harness_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    done = lm_eval.simple_evaluate(
        model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )
    assert done["results"]["capitals"]["acc,none"] == 1.0
    assert done["results"]["answers"]["exact_match,none"] == 1.0
    texts = [log_probabilities(model, model.tok_encode(text)) for text in TEXTS]
    perplexity = math.exp(-sum(map(sum, texts)) / sum(len(text.encode()) for text in TEXTS))
    assert done["results"]["texts"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=0.01)
    samples = sorted(done["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    assert [sample["doc"]["country"] for sample in samples] == list(CAPITALS)
    for sample in samples:
        context = model.tok_encode(f"The capital of {sample['doc']['country']} is")
        for choice, ((logprob, _),) in zip(CHOICES, sample["resps"], strict=True):
            answer = model.tok_encode(f" {choice}", add_special_tokens=False)
            wanted = log_probabilities(model, context + answer)[len(context) - 1 :]
            assert logprob == pytest.approx(sum(wanted), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("own_tasks_only")
def test_the_command_runs_the_harness(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--include_path", str(folder), "--output_path", str(tmp_path / "out.json")]
    arguments = ["--model_args", f"bundle={DEMO},memory=2GB", "--tasks", "capitals", "--limit", "2"]
    assert main(["lm-eval", "run", *arguments, *where]) == 0
    assert "stem_edge ({'bundle'" in capsys.readouterr().out
    (written,) = tmp_path.glob("out*.json")
    results = json.loads(written.read_text())
    assert results["results"]["capitals"]["acc,none"] == 1.0
    assert results["config"]["model"] == "stem_edge"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "stem-edge lm-eval run --help"),
        (["run", "--help"], "--gen_kwargs"),
        (["run"], "--gen_kwargs"),
    ],
)
def test_help(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["lm-eval", *arguments])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert text in out
    assert ("default: stem_edge" in out) == ("run" in arguments) and "default: hf" not in out


@pytest.mark.usefixtures("own_tasks_only")
def test_a_mistake_in_the_model_arguments_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--include_path", str(folder), "--tasks", "capitals"]
    assert main(["lm-eval", "run", "--model_args", "bundle=nowhere", *where]) == 1
    assert "stem-edge: nowhere" in capsys.readouterr().err.splitlines()[-1]


def test_the_name_is_in_the_list_of_the_harness_beside_its_own() -> None:
    assert get_model("stem_edge") is StemEdgeLM
    assert get_model("dummy") is not None


def test_texts_from_the_command_line_are_converted() -> None:
    arguments = f"bundle={DEMO},context_length=64,threads=1,overlap=False,reads=mmap,reuse=false"
    model = StemEdgeLM.create_from_arg_string(arguments, {"batch_size": 1, "device": None})
    with model:
        assert model.max_length == 64
        assert cast(Prefetcher, model.model.engine.rows)._background is None  # without overlap
    with StemEdgeLM(DEMO, context_length="64", memory=2e9, max_gen_toks="9") as model:
        assert (model.max_length, model._max_new) == (64, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bundel": "x"}, "no bundle"),
        ({"bundle": DEMO, "memroy": 3}, "unknown option memroy; expected some of: bundle, .*reads"),
        ({"bundle": DEMO, "threads": "two"}, "the option threads is 'two'"),
        ({"bundle": DEMO, "reads": "slowly"}, "the option reads is 'slowly'"),
        ({"bundle": DEMO, "batch_size": "many"}, "the option batch_size is 'many'"),
        ({"bundle": DEMO, "batch_size": 0}, "sequences is 0; expected 1 to"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StemEdgeLM(**options)


@pytest.mark.parametrize(
    ("begin", "bos", "eos", "prefix"),
    [([5], 1, 2, 5), ([], 1, 2, 1), ([], None, 2, 2), ([], 0, None, 0)],
)
def test_the_token_before_a_text_is_that_of_the_harness(
    begin: list[int], bos: int | None, eos: int | None, prefix: int
) -> None:
    config = SimpleNamespace(bos_id=bos)
    parts = SimpleNamespace(_begin=begin, eot_token_id=eos, model=SimpleNamespace(config=config))
    assert StemEdgeLM.prefix_token_id.__get__(parts) == prefix


def test_the_boundary_between_context_and_continuation(model: StemEdgeLM) -> None:
    begin = model.prefix_token_id
    assert model.tok_encode("Spain")[0] == begin
    assert model.tok_encode("<|begin_of_text|>Spain") == model.tok_encode("Spain")
    whole = model.tok_encode("The capital of Peru is Lima")
    logs = log_probabilities(model, whole)
    at = len(model.tok_encode("The capital of Peru is")) - 1
    answers = ask(
        model,
        ("The capital of Peru is", " Lima"),
        ("The capital of Peru is ", "Lima"),  # the space moves to the continuation
        ("<|begin_of_text|>The capital of Peru is", " Lima"),
        ("", "The capital of Peru is Lima"),  # from the first token, after the begin token
    )
    assert [logprob for logprob, _ in answers] == pytest.approx(
        [sum(logs[at:])] * 3 + [sum(logs)], abs=TOLERANCE
    )
    assert [greedy for _, greedy in answers] == [True, True, True, False]
    spaces = [begin, *model.tok_encode("  x", add_special_tokens=False)]
    ((logprob, _),) = ask(model, ("  ", "x"))
    assert logprob == pytest.approx(sum(log_probabilities(model, spaces)), abs=TOLERANCE)


def test_a_long_text_is_scored_in_windows_every_token_once() -> None:
    text = " ".join(TEXTS * 3)
    with StemEdgeLM(DEMO, context_length=16) as model:
        asked = requests("loglikelihood_rolling", (text,), (TEXTS[1],), (text,))
        long, short, again = model.loglikelihood_rolling(asked, disable_tqdm=True)
        ids = model.tok_encode(text)
    with StemEdgeLM(DEMO) as model:
        wanted = log_probabilities(model, ids[:17])
        for start in range(16, len(ids) - 1, 16):
            end = min(start + 16, len(ids) - 1)
            wanted += log_probabilities(model, ids[end - 16 : end + 1])[start - end :]
        assert len(wanted) == len(ids) - 1
        wanted_short = sum(log_probabilities(model, model.tok_encode(TEXTS[1])))
        assert short == pytest.approx(wanted_short, abs=TOLERANCE)
    assert long == again
    assert long == pytest.approx(sum(wanted), abs=TOLERANCE)


def test_what_is_too_long_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with StemEdgeLM(DEMO, context_length=16) as model:
        ((cut, _),) = ask(model, (" ".join(TEXTS), " Spain"))
    assert "1 of 1 requests are longer than the context of 16 tokens" in caplog.text
    assert cut < 0


def test_generation_stops_samples_and_is_reproducible(model: StemEdgeLM) -> None:
    prompt = "The capital of France is"
    sampled = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8}
    asked = requests(
        "generate_until",
        (prompt, {"until": [".", ""], "max_gen_toks": 10}),
        (prompt, {"until": " It", "max_new_tokens": 10, "temperature": 0.7, "do_sample": False}),
        (prompt, {"max_gen_toks": 2}),
        (prompt, sampled),
        (prompt, sampled),
    )
    texts = model.generate_until(asked, disable_tqdm=True)
    assert texts[:2] == [" Paris", " Paris."]
    assert texts[2].startswith(" Paris")
    assert texts[3] != texts[4]  # repeats of a request differ
    assert model.generate_until(asked, disable_tqdm=True) == texts
    (text,) = model.generate_until(requests("generate_until", (" ".join(TEXTS * 20), {})), True)
    assert isinstance(text, str)


def test_texts_generated_together_are_those_of_one_at_a_time(model: StemEdgeLM) -> None:
    asked = requests(
        "generate_until",
        *[(f"The capital of {one} is", {"until": "."}) for one in (*CAPITALS, "Spain")],
        ("Spain", {"max_gen_toks": 1}),
    )
    wanted = model.generate_until(asked, disable_tqdm=True)
    with StemEdgeLM(DEMO, batch_size="4", memory="2GB") as several:
        assert several.model.plan.sequences == 4
        seen: list[str] = []
        several.cache_hook.add_partial = lambda kind, request, text: seen.append(text)
        assert several.generate_until(asked, disable_tqdm=True) == wanted
        assert several.generate_until([], disable_tqdm=True) == []
    assert sorted(seen) == sorted(wanted) and wanted[0] == " Lima"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 1),
        ({"batch_size": 3}, 3),
        ({"batch_size": "auto"}, 8),
        ({"batch_size": "auto:4", "max_batch_size": "2"}, 2),
        ({"batch_size": 1, "sequences": "5"}, 5),
    ],
)
def test_texts_at_a_time(given: dict[str, Any], expected: int) -> None:
    with StemEdgeLM(DEMO, context_length=16, **given) as model:
        assert model._sequences == model.model.plan.sequences == expected


def test_sampling_params_of_a_task() -> None:
    params = sampling_params({"temperature": 0.5, "top_p": "0.9", "seed": 3, "until": None}, 7, 2)
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.5, 0.9, 5, [])
    assert params.max_new_tokens == 7
    assert sampling_params({"do_sample": True}, 7).temperature == 1.0
    with pytest.raises(InputError, match="unknown generation option beams; expected some of: max"):
        sampling_params({"beams": 2}, 7)
    for name in ("seed", "until", "do_sample"):
        with pytest.raises(InputError, match=f"the option {name} is 0.5"):
            sampling_params({name: 0.5}, 7)
    with pytest.raises(InputError, match="top_p is 2"):
        sampling_params({"top_p": 2}, 7)


def test_generation_that_cannot_fit_is_refused_at_once(model: StemEdgeLM) -> None:
    asked = requests("generate_until", ("x", {"max_gen_toks": 256}))
    with pytest.raises(InputError, match="up to 256 new tokens, but the context holds 256"):
        model.generate_until(asked)


def test_results_reach_the_cache_of_the_harness(model: StemEdgeLM, tmp_path: Path) -> None:
    caching = pytest.importorskip("lm_eval.api.model").CachingLM(model, str(tmp_path / "cache.db"))
    asked = requests("loglikelihood", ("The capital of Peru is", " Lima"), ("Peru", " is"))
    first = caching.loglikelihood(asked)
    assert len(caching.dbdict) == 2
    model._scorer.processed = 0
    assert caching.loglikelihood(asked) == first
    assert model._scorer.processed == 0
    caching.dbdict.close()


CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " It is "}]


def test_the_last_message_can_go_on(model: StemEdgeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[user] Hello </s>[assistant] It is"
    monkeypatch.setattr(type(model.model), "chat_prompt", lambda *_, **__: f"{text} </s>")
    assert model.apply_chat_template(CHAT, add_generation_prompt=False) == text
    assert model.apply_chat_template(CHAT) == f"{text} </s>"
    assert without_end("[user] Hello </s>", CHAT) == "[user] Hello </s>"


def test_without_a_chat_template(model: StemEdgeLM) -> None:
    assert model.chat_template(False) == ""
    assert model.tokenizer_name.startswith("stem_edge-")
    with pytest.raises(
        InputError, match=r"tokenizer_config\.json: no chat template; give a plain prompt"
    ):
        model.apply_chat_template(CHAT)

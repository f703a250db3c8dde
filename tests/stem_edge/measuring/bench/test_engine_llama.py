"""Measurements on ggml."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_model
from installed import DEMO, needs_ggml
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError
from stem_edge.measuring.bench.bench import bench
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.together import FollowedText, texts_of
from stem_edge.measuring.phases.report import report_table as measure_table
from stem_edge.measuring.phases.report import to_dict
from stem_edge.measuring.quality.quality import evaluate
from stem_edge.runtime.backends.ggml.engine import GgmlEngine
from stem_edge.runtime.backends.ggml.expected import CHOICES
from stem_edge.runtime.backends.onnxruntime.engine import OnnxRuntimeEngine
from stem_edge.runtime.consistency import verify_runs

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.slow, needs_ggml]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by kind")
WAYS = 12  # of running on one engine, as tests/runtime/test_consistency.py lists them


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with weights that can be rearranged."""
    out = tmp_path_factory.mktemp("alone") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, engine="gguf", backbone="q4_0")
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The capital of Peru is Lima, and that of France is Paris. " * 3)
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of random weights in float16, with ids of the demo's range."""
    config = LlamaConfig(
        vocab_size=open_bundle(DEMO).manifest.model.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", LlamaForCausalLM(config), "F16")


def test_a_model_of_llama_is_freed_with_its_last_reference(gguf: Path) -> None:
    from stem_edge.measuring.bench.engine_llama import LlamaModel

    model = LlamaModel(gguf, 32, 1)
    gone, mapped = weakref.ref(model), Path("/proc/self/maps")
    if mapped.exists():
        assert str(gguf) in mapped.read_text()
    del model
    gc.collect()
    assert gone() is None
    if mapped.exists():
        assert str(gguf) not in mapped.read_text()


def test_llama_refuses_an_invalid_file(tmp_path: Path) -> None:
    from stem_edge.measuring.bench.engine_llama import LlamaModel

    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(BackendError, match=r"cannot load .*m\.gguf"):
        LlamaModel(tmp_path / "m.gguf", 32, 1)


def test_runs_on_ggml_give_the_same(tiny_gguf: Path) -> None:
    seen: list[str] = []
    results = verify_runs(tiny_gguf, max_new_tokens=8, progress=seen.append)
    assert seen == list(results)
    unlike = {way for way, found in results.items() if found != "ok"}
    assert unlike == {"smaller chunks, ggml"} and len(results) == WAYS
    assert {"plain, ggml", "fewest slots, ggml", "mmap, ggml"} <= set(results)


def test_repacked_runs_are_compared_with_each_other(alone: Path) -> None:
    names = GgmlEngine().ways.kernels(open_bundle(alone), None)
    assert names["ggml"] == {}
    if "ggml repacked" not in names:
        pytest.skip("this build of ggml cannot repack weights")
    assert names["ggml repacked"] == {"repack": True}
    results = verify_runs(alone, max_new_tokens=4)
    assert results["overlapped, ggml repacked"] == results["mmap, ggml repacked"] == "ok"


def test_no_engine_at_all(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (OnnxRuntimeEngine, GgmlEngine):
        monkeypatch.setattr(engine, "installed", False)
    with pytest.raises(BackendError, match="ggml is not installed"):
        verify_runs(alone)


@linux
def test_measure_counts_the_file_as_mapped(tiny_gguf: Path) -> None:
    found = stem_edge.measure(
        tiny_gguf, engine="ggml", prompt_tokens=60, new_tokens=20, warm_start=False, threads=1
    )
    decode = found.phase("decode")
    size = open_bundle(tiny_gguf).manifest.files["backbone.gguf"].nbytes
    assert found.engine == to_dict(found)["engine"] == "ggml"
    assert size / 2 < (found.mapped or 0) <= size + 4096
    assert (decode.cached_backbone or 0) <= size + 4096
    expected = found.prediction
    assert (expected.kv_cache, expected.row_cache) == (decode.kv_cache, decode.row_cache)
    assert expected.anonymous == pytest.approx(found.peak, rel=0.25)
    assert expected.hit_rate == found.hit_rate
    assert max(map(len, measure_table(found).splitlines())) <= 80


def test_fit_plans_for_the_engine_that_runs_it(
    tiny_bundle: Path, alone: Path, capsys: Capture
) -> None:
    (chosen,) = stem_edge.fit(alone, "100MB", bandwidth="10GB")
    (other,) = stem_edge.fit(tiny_bundle, "100MB", bandwidth="10GB")
    assert [one.plan.engine for one in (chosen, other)] == ["ggml", "onnxruntime"]
    assert chosen.mapped == chosen.footprint.step_nbytes > 0
    assert other.mapped == 0  # because small ones are not prepared
    arguments = ["--bandwidth", "1GB", "--engine", "ggml", "--repack"]
    assert main(["fit", str(alone), "--memory", "100MB", *arguments]) == 0
    out = capsys.readouterr().out
    assert "backbone q4_0 for ggml" in out and "--engine ggml --repack" in out
    with pytest.raises(InputError, match="repack: not supported by the engine in use"):
        stem_edge.fit(tiny_bundle, "100MB", bandwidth="10GB", repack=True)


def test_fit_names_mixtures_for_a_checkpoint(tiny_checkpoint: Path, capsys: Capture) -> None:
    found = stem_edge.fit(tiny_checkpoint, device="pi5", engine="ggml")
    assert [(one.types.weights, one.tables) for one in found] == list(CHOICES)
    assert main(["fit", str(tiny_checkpoint), "--device", "pi5", "--engine", "ggml"]) == 0
    assert "OUT --engine gguf --backbone q8_0 --tables int8" in capsys.readouterr().out
    with pytest.raises(InputError, match="engine is 'torch'"):
        stem_edge.fit(tiny_checkpoint, device="pi5", engine="torch")


def test_what_bench_takes_on_ggml(tiny_bundle: Path, tiny_gguf: Path) -> None:
    with pytest.raises(InputError, match="nothing is prepared on ggml"):
        bench(tiny_gguf, engine="ggml", against=["unprepared"])
    with pytest.raises(InputError, match="repack: not supported by the engine in use"):
        bench(tiny_bundle, repack=True)


def test_llama_takes_prompts_longer_than_its_usual_batch(gguf: Path) -> None:
    from stem_edge.measuring.bench.engine_llama import LlamaModel

    model = LlamaModel(gguf, 700, 1)
    assert 0 <= model.choose([index % 300 for index in range(600)]) < model.vocab_size


@pytest.mark.parametrize(
    ("options", "lazy", "repack"),
    [
        ({}, "AUTO", True),
        ({"lazy": True}, "ON", True),
        ({"lazy": False, "repack": False}, "OFF", False),
    ],
)
def test_modes_of_llama(
    options: dict[str, Any], lazy: str, repack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    from stem_edge.measuring.bench.engine_llama import LlamaModel

    seen: list[tuple[int, bool]] = []

    def load(path: bytes, params: Any) -> None:
        seen.append((params.lazy_mode, params.use_extra_bufts))

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", load)
    with pytest.raises(BackendError, match="cannot load"):
        LlamaModel("x.gguf", 16, 1, **options)
    assert seen == [(getattr(llama_cpp, f"LLAMA_LAZY_MODE_{lazy}"), repack)]


def test_bench_takes_a_file_that_llama_runs(
    tiny_bundle: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stem_edge.measuring.bench.engine_llama import LlamaModel

    monkeypatch.setattr("stem_edge.measuring.planning.bandwidth.READ_NBYTES", 1 << 20)
    path = gguf
    few: dict[str, Any] = {
        "prompt_tokens": 8,
        "new_tokens": 2,
        "rounds": 1,
        "loads": 0,
        "threads": 1,
    }
    words = [f"llama.cpp={path}", f"llama.cpp={path},lazy,no-repack"]
    found = bench(tiny_bundle, against=words, **few)
    names = [f"llama.cpp {path.name}", f"llama.cpp {path.name} lazy no-repack"]
    assert list(found.subjects) == ["bundle", *names]
    with pytest.raises(InputError, match=r"x\.gguf: no such file"):
        bench(tiny_bundle, against=["llama.cpp=x.gguf"], **few)
    with pytest.raises(BackendError, match="with the same tokenizer"):
        LlamaModel(path, 16, 1).choose([1 << 20])


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_of_llama_are_computed_as_alone(gguf: Path, unified: bool) -> None:
    from stem_edge.measuring.bench.engine_llama import Input, LlamaModel, LlamaSteps

    texts = texts_of(list(range(5, 400)), 3, 20, 5)
    model = LlamaModel(gguf, 60, 1, exact=True, sequences=3, each=True, unified=unified)
    found: list[list[int]] = []
    ran = LlamaSteps.run

    def run(steps: LlamaSteps, inputs: list[Input]) -> list[int]:
        found.append(ran(steps, inputs))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaSteps, "run", run)
        together = model.together(texts, 3)
    assert [len(step) for step in found] == [1, 2, 3, *[3] * 4, 3]
    assert together.figures()["distinct_rows_per_step"] == 3
    alone = LlamaModel(gguf, 60, 1, exact=True)
    for sequence, text in enumerate(texts[:3]):
        alone.clear()
        best = [alone.choose(text.prompt), *(alone.choose([token]) for token in text.answer[:4])]
        steps = found[sequence:7]
        assert [step[sequence] for step in steps][: len(best)] == best[: len(steps)]
    alone.clear()
    assert found[-1][-1] == alone.choose(texts[3].prompt)  # the one that joined


@pytest.mark.parametrize("drafts", [1, 2, 10])
def test_guesses_of_llama(gguf: Path, drafts: int) -> None:
    from stem_edge.measuring.bench.engine_llama import LlamaModel

    words = list(range(10, 30))
    text = FollowedText([*words, 5, 6], [7, *words[:15], 8, 10, 50, 12, 51])
    model = LlamaModel(gguf, 60, 1, exact=True)
    plain, guessed = model.guess(text, 0), model.guess(text, drafts)
    assert (plain.drafted, plain.accepted) == (0, 0)
    assert len(plain.own) == len(text.answer) and guessed.own == plain.own
    assert len({*plain.own}) > 3
    assert guessed.drafted > guessed.accepted >= 14 * drafts // (drafts + 1)
    model.clear()
    assert plain.own[:2] == [model.choose(text.prompt), model.choose(text.answer[:1])]


def test_bench_takes_batches_and_guesses_of_llama(tiny_bundle: Path, gguf: Path) -> None:
    few: dict[str, Any] = {"prompt_tokens": 8, "new_tokens": 4, "rounds": 1, "threads": 1}
    few |= {"against": [f"llama.cpp={gguf}"]}
    found = bench(tiny_bundle, cases="2", **few)
    assert [(one.subject, one.case) for one in found.results] == [
        (name, count) for name in ("bundle", "llama.cpp m.gguf") for count in "12"
    ]
    assert "bundle / llama.cpp m.gguf, 2 sequences: " in report_table(found)
    ways = {
        (one.subject, one.way) for one in bench(tiny_bundle, cases="speculation", **few).results
    }
    llama = {("llama.cpp m.gguf", way) for way in ("plain", "2 guesses", "10 guesses")}
    assert llama < ways


def test_bench_needs_the_backbone_of_what_it_compares(alone: Path) -> None:
    with pytest.raises(BackendError, match="no backbone for onnxruntime"):
        bench(alone, against=["onnxruntime"])


def test_eval_compares_bundles_of_two_engines(
    tiny_bundle: Path, tiny_gguf: Path, text: Path, capsys: Capture
) -> None:
    found = evaluate(tiny_gguf, text, against=tiny_bundle)
    assert found.engine == "ggml" and found.divergence is not None
    assert found.divergence.reference_engine == "onnxruntime"
    assert found.divergence.mean < 1e-2  # rows of 32 and of 8 bits
    arguments = ["--text", str(text), "--engine", "ggml", "--against", str(tiny_gguf)]
    assert main(["eval", str(tiny_gguf), *arguments, "--against-engine", "ggml"]) == 0
    out = capsys.readouterr().out
    assert "computed by ggml" in out and f"reference {tiny_gguf} on ggml" in out
    assert main(["eval", str(tiny_gguf), "--text", str(text), "--prefill"]) == 1


def test_inspect_plans_memory_by_engine(
    tiny_bundle: Path, tiny_gguf: Path, capsys: Capture
) -> None:
    plans = []
    for path in (tiny_bundle, tiny_gguf):
        assert main(["inspect", str(path), "--memory", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["engine"] for plan in plans] == ["onnxruntime", "ggml"]
    assert plans[1]["weights"] < plans[0]["weights"]


NO_ONNXRUNTIME = """
import importlib.util, sys
sys.modules["onnxruntime"] = None  # importing it raises
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "onnxruntime" else real(name, *rest)
"""
USES = {
    "load": "model = stem_edge.load({0!r}); model.generate_text('The', max_new_tokens=2)",
    "memory_plan": "stem_edge.memory_plan({0!r})",
    "verify_runs": "from stem_edge.runtime.consistency import verify_runs\n"
    "assert 'plain, ggml' in verify_runs({0!r}, max_new_tokens=2)",
    "fit": "stem_edge.fit({0!r}, '100MB', bandwidth='1GB')",
    "evaluate": "stem_edge.evaluate({0!r}, {1!r})",
    "measure": "stem_edge.measure({0!r}, prompt_tokens=8, new_tokens=2)",
}


@pytest.mark.parametrize("name", USES)
def test_without_onnxruntime_everything_runs_on_ggml(
    name: str, tiny_gguf: Path, text: Path
) -> None:
    code = f"{NO_ONNXRUNTIME}\nimport stem_edge\n{USES[name].format(str(tiny_gguf), str(text))}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr

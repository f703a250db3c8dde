"""Plans for devices: what fits, what does not, and what the command says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.commands.measuring import fit as fit_cli
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.formats import BackboneFormat, WeightType
from stem_edge.measuring.memory.device_profiles import DEVICES
from stem_edge.measuring.planning.target import Fit, fit_on_device
from stem_edge.runtime.backends.engines import loaders
from stem_edge.runtime.backends.onnxruntime.expected import CHOICES
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.units import parse_size

Capture = pytest.CaptureFixture[str]


def onnx_types(one: Fit) -> tuple[WeightType, int]:
    """Weights and block size."""
    assert isinstance(one.types, BackboneFormat)
    return one.types.weights, one.types.block_size


def test_what_is_planned_can_be_loaded(tiny_bundle: Path) -> None:
    for memory in ("60MB", "200MB"):
        found = stem_edge.fit(tiny_bundle, memory, bandwidth="10GB")[0]
        assert found.memory <= 200_000_000
        assert found.prediction.anonymous <= found.load_memory
        with stem_edge.load(tiny_bundle, context_length=found.plan.context_length) as model:
            assert model.plan.slots == found.plan.slots or found.plan.slots <= model.plan.slots


def test_several_sequences_are_planned_and_can_be_loaded() -> None:
    one, four = (
        stem_edge.fit(DEMO, "100MB", bandwidth="10GB", context_length=64, sequences=count)[0]
        for count in (1, 4)
    )
    assert four.plan.kv_cache == four.prediction.kv_cache == 4 * one.prediction.kv_cache
    report = fit_cli.report_table([four], str(DEMO), bundle=True)
    assert "for 4 x 64 tokens" in report and report.endswith("--context-length 64 --sequences 4")
    with pytest.raises(InputError, match="sequences is 0; expected 1 to 128"):
        stem_edge.fit(DEMO, "100MB", bandwidth="10GB", sequences=0)


def least_memory() -> int:
    """Memory that the demo needs at least with 64 tokens of context, plus a rounding margin."""
    with pytest.raises(MemoryPlanError) as caught:
        stem_edge.fit(DEMO, "1MB", bandwidth="10GB", context_length=64)
    match = re.search(r"at least ([\d.]+ MB) must", str(caught.value))
    assert match
    return parse_size(match[1]) + 100_000


def test_the_command_that_it_prints_runs_with_the_least_memory() -> None:
    found = stem_edge.fit(DEMO, least_memory(), bandwidth="10GB", context_length=64)
    command = fit_cli.report_table(found, str(DEMO), bundle=True).splitlines()[-1].split()
    run = [sys.executable, "-m", "stem_edge", *command[1:], "-p", "The", "-n", "1"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_more_memory_gives_more_slots_and_hits() -> None:
    least = least_memory()
    plans = [
        stem_edge.fit(DEMO, least + more, bandwidth="10GB", context_length=64)[0]
        for more in (0, 10_000_000)
    ]
    slots = [one.plan.slots for one in plans]
    hits = [one.prediction.hit_rate for one in plans]
    assert slots == sorted(slots) and slots[0] < slots[-1] == 1756
    assert hits == sorted(hits) and 0 < hits[0] < hits[-1] == 1


def test_too_little_memory_names_the_least_which_then_fits(tiny_bundle: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"1 MB of memory are too little.*at least [\d.]+ MB"):
        stem_edge.fit(tiny_bundle, "1MB", bandwidth="10GB")


def test_a_text_decides_the_hit_rate(tiny_bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "same.npy", np.full(1000, 7))
    same = stem_edge.fit(tiny_bundle, "60MB", bandwidth="1GB", text=tmp_path / "same.npy")[0]
    assert same.prediction.hit_rate == 0.999
    assert "simulated" in same.hit_source
    assumed = stem_edge.fit(tiny_bundle, "60MB", bandwidth="1GB")[0]
    assert "Zipf" in assumed.hit_source


def test_a_checkpoint_gets_types_to_export_it_with(tiny_checkpoint: Path, capsys: Capture) -> None:
    found = stem_edge.fit(tiny_checkpoint, device="pi5")
    choices = [(format.weights, format.block_size, rows) for format, rows in CHOICES]
    assert [(*onnx_types(one), one.tables) for one in found] == choices
    sizes = [one.footprint.flash_nbytes for one in found]
    assert sizes[0] == max(sizes) and sizes[-1] == min(sizes)
    assert main(["fit", str(tiny_checkpoint), "--device", "pi5"]) == 0
    said = capsys.readouterr().out
    assert f"stem-edge export {tiny_checkpoint} OUT --quality near-lossless" in said
    assert "also fit:" in said and "stated for pi5" in said


def test_the_predicted_size_is_that_of_the_export(tiny_checkpoint: Path, tmp_path: Path) -> None:
    planned = stem_edge.fit(tiny_checkpoint, device="pi5")[2]
    stem_edge.export_bundle(
        tiny_checkpoint,
        tmp_path / "bundle",
        size=planned.footprint.backbone_nbytes,
        tables="int8",
        prefill_graph=True,
    )
    made = stem_edge.fit(tmp_path / "bundle", device="pi5")[0]
    assert made.footprint.flash_nbytes == pytest.approx(planned.footprint.flash_nbytes, rel=0.1)


def test_slow_flash_costs_time() -> None:
    speeds = [
        stem_edge.fit(DEMO, least_memory(), bandwidth="10GB", flash=flash, context_length=64)[
            0
        ].prediction
        for flash in ("nvme", "sdcard")
    ]
    assert speeds[0].stall_per_token < speeds[1].stall_per_token
    assert speeds[0].decode_tokens_per_second > speeds[1].decode_tokens_per_second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "toaster"}, "device 'toaster' is not known; expected one of phone-4gb"),
        ({"flash": "tape"}, "flash is 'tape'; expected one of nvme"),
        ({"context_length": 100_000}, "context_length is 100000; this model takes 1 to 256"),
        ({"memory": "much"}, "not understood"),
        ({"memory": "1GB", "text": "no/such.txt"}, "no/such.txt: cannot read"),
    ],
)
def test_bad_input(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        stem_edge.fit(DEMO, bandwidth="10GB", **options)  # type: ignore[arg-type]


def test_a_text_needs_a_tokenizer(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="export the checkpoint first"):
        stem_edge.fit(tiny_checkpoint, device="pi5", text="book.txt")


def test_prompts_take_the_matrices_that_decode_where_both_sets_do_not_fit(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is that of a load: with a device its memory counts, otherwise this machine's."""
    options: dict[str, Any] = {"memory": "1GB", "bandwidth": "10GB"}
    (first, *_) = stem_edge.fit(tiny_checkpoint, **options)
    both = first.footprint.step_nbytes + first.footprint.prefill_nbytes
    for size in (both, both - 1):
        device = replace(DEVICES["pi4"], memory=size)
        monkeypatch.setitem(DEVICES, "pi4", device)
        (there, *_) = stem_edge.fit(tiny_checkpoint, device="pi4", **options)
        monkeypatch.setattr("stem_edge.measuring.planning.fit.memory_limit", lambda size=size: size)
        (here, *_) = stem_edge.fit(tiny_checkpoint, **options)
        assert there.needs.prefill == here.needs.prefill == (size == both)
        said = fit_cli.report_table([there], "model", bundle=True)
        assert ("--no-prefill-graph" in said) == (size < both)


def test_the_command(capsys: Capture) -> None:
    assert main(["fit", str(DEMO), "--device", "phone-4gb"]) == 0
    said = capsys.readouterr().out
    assert "run it with:" in said and "--context-length 256" in said
    assert max(map(len, said.splitlines())) <= 100
    assert main(["fit", str(DEMO), "--device", "phone-4gb", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)[0]
    assert figures["slots"] == 1756 and figures["flash"] == "ufs2"
    assert main(["fit", str(DEMO), "--memory", "1MB", "--bandwidth", "1GB"]) == 1
    assert "too little" in capsys.readouterr().err


def test_memory_on_a_device_leaves_room_for_mapped_weights(tiny_bundle: Path) -> None:
    bundle = stem_edge.open_bundle(tiny_bundle)
    (loader,) = loaders(bundle, "onnxruntime", LoadOptions())
    fitting = fit_on_device(bundle, loader.needs, 1_000_000_000, 64)
    assert 30_000_000 < fitting < 1_000_000_000
    with pytest.raises(MemoryPlanError, match="take a larger device"):
        fit_on_device(bundle, loader.needs, 1_000_000, 64)

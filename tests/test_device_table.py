"""tools/device_table.py on the CPU playing a device: what it measures and prints, not how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import device_table
import device_table_inputs
import numpy as np
import pytest
from conftest import DEMO
from device_table import Compared, compare, description, headline, make_parser, tables
from device_table_inputs import make_bundles, tokens_of

from stem_edge.bundle import open_bundle
from stem_edge.errors import InputError
from stem_edge.graph.device_rows import DeviceRows

QUICK = ["--prompt-tokens", "40", "--new-tokens", "10", "--rounds", "1", "--threads", "1"]
BUNDLE = open_bundle(DEMO)
SLOTS = 64


@pytest.fixture(scope="module")
def compared() -> Compared:
    line = [str(DEMO), *QUICK, "--slots", str(SLOTS), "--host-slots", "64"]
    return compare(DEMO, make_parser().parse_args(line))


@pytest.mark.slow
def test_device_memory_is_less_by_the_rows_without_a_slot(compared: Compared) -> None:
    layout = BUNDLE.manifest.tables
    assert layout is not None
    without = layout.records - SLOTS
    assert compared.saved("allocated") == without * DeviceRows(layout, "fp32").slot_nbytes
    assert compared.tables_less_cache == without * layout.record_nbytes
    assert (compared.saved("planned") or 0) >= (compared.saved("allocated") or 0)
    assert compared.saved("driver_says") is None


@pytest.mark.slow
def test_tables_have_a_cell_in_each_column(compared: Compared) -> None:
    lines = list(tables([compared, compared]))
    widths = [line.count("|") - 1 for line in lines if line]
    assert widths == 6 * [len(device_table.SPEEDS)] + 4 * [len(device_table.RATIOS)]
    assert lines[2].startswith("| demo_model | flash | 64 |")
    assert lines[3].startswith(f"| demo_model | resident | {BUNDLE.manifest.model.records:,} |")


def test_the_json_has_the_machine_and_says_that_it_is_software(compared: Compared) -> None:
    about = description([compared])
    assert {"machine", "system", "provider", "device", "onnxruntime", "date", "stem-edge"} <= set(
        about
    )
    assert about["software"] == "yes"
    assert "**The device is software**" in "\n".join(headline(about, [compared]))
    about["software"] = "no"
    assert "software" not in list(headline(about, [compared]))[-1]
    found = json.loads(json.dumps(compared.to_dict()))
    assert found["name"] == found["report"]["bundle"] == "demo_model"
    assert set(found["flash_to_resident"]) == {"prefill", "decode", "median_step"}
    assert found["report"]["settings"]["text"] == "the text inside the package"
    assert set(found["report"]["subjects"]) == {"bundle", "resident"}


@pytest.mark.slow
def test_the_command_makes_bundles_once_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    made = make_bundles(tmp_path, "small", "int8")
    assert [path.name for path in made] == ["small-third-int8", "small-full-int8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in made)
    layers = [open_bundle(path).manifest.model.stem_layers for path in made]
    assert layers == [(2, 5), (1, 2, 3, 4, 5)]
    monkeypatch.setattr(device_table_inputs, "write_checkpoint", None)  # they are there
    line = ["device_table", "--make", str(tmp_path), "--shape", "small", *QUICK, "--slots", "50"]
    monkeypatch.setattr(sys, "argv", [*line, "--json", str(tmp_path / "report.json")])
    device_table.main()
    assert "| small-full-int8 | resident | 300 |" in capsys.readouterr().out
    found = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in found["bundles"]] == [path.name for path in made]
    assert found["about"]["variant"] == "fp32"


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=10**9)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(InputError, match=r"third-int8: 13\.\d GB .*; 1 GB are free: give --make"):
        make_bundles(tmp_path, "llama-3.2-1b", "int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "no bundle is given"), (["/none"], "/none"), ([str(DEMO), "--slots", "0"], "slots")],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["device_table", *arguments, *QUICK])
    with pytest.raises(SystemExit) as ended:
        device_table.main()
    said = str(ended.value)
    assert said.startswith("device_table: ") and words in said and "\n" not in said


def test_words_stand_for_tokens_where_a_tokenizer_has_only_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, source = tokens_of(BUNDLE, None, 10)
    assert source == "the text inside the package"
    monkeypatch.setattr(device_table_inputs, "LARGE_VOCABULARY", 1000)
    monkeypatch.setattr(device_table_inputs, "FEW_TOKENS", len(ids))
    words, source = tokens_of(BUNDLE, None, 3000)
    assert "words of the text" in source and len(words) >= 3000
    assert words.min() >= 0 and words.max() < BUNDLE.manifest.model.vocab_size
    half = len(words) // 4
    same = np.mean(words[:half] == words[len(words) // -(-3000 // 905) :][:half])
    assert 0.1 < same < 0.9  # common words stay, rare ones change


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ids.int32"
    np.array([3, 1, 2], "<i4").tofile(path)
    ids, source = tokens_of(BUNDLE, path, 100)
    assert (ids.tolist(), source) == ([3, 1, 2], "ids.int32")

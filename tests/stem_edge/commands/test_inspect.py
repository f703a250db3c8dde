"""`stem-edge inspect`: figures of a bundle, as a table and as JSON."""

import json
from pathlib import Path

import pytest
from manifests import LAYOUT, make_bundle

from stem_edge.bundle.manifest import MANIFEST
from stem_edge.commands.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "model")


def shown(text: str) -> dict[str, str]:
    """Name -> value of each line of the table."""
    return {line[:22].strip(): line[22:] for line in text.splitlines()[1:]}


# test_config.py counts a model of d_ff 6 and dim 4; here `gate`, `down` and `up` are 16 wide, and
# every tensor has dim 16 on one side.
BACKBONE_PARAMETERS = 4 * (316 + 5 * 4 * (16 - 6))
TABLE_PARAMETERS = 10 * 16
ACTIVE_PARAMETERS = BACKBONE_PARAMETERS - 9 * 16 + 16


def test_text(bundle: Path, capsys: Capture) -> None:
    assert main(["inspect", str(bundle)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == str(bundle)
    expected = {
        "architecture": "2 layers, 16 wide, d_ff 16",
        "attention": "2 heads, 1 for keys and values, 2 wide",
        "STEM layers": "1 of 2: 1",
        "vocabulary": "10 tokens, head separate",
        "context": "16 tokens",
        "parameters": f"{BACKBONE_PARAMETERS + TABLE_PARAMETERS:,}",
        "in tables": f"{TABLE_PARAMETERS} (7%)",
        "active per token": f"{ACTIVE_PARAMETERS:,}",
        "backbone": "8 B, int4 in blocks of 32",
        "embedding, head": "int8",
        "one record": "20 B, the most that a token reads",
        "divergence": "0.5 nats from the checkpoint, mean",
    }
    assert expected.items() <= shown(out).items()


def test_json(bundle: Path, capsys: Capture) -> None:
    assert main(["inspect", str(bundle), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    figures = json.loads(out)
    derived = {
        "parameters": BACKBONE_PARAMETERS + TABLE_PARAMETERS,
        "parameters_active": ACTIVE_PARAMETERS,
        "parameters_tables": TABLE_PARAMETERS,
        "record_nbytes": LAYOUT.record_nbytes,
        "flash_nbytes": 200,
        "backbone_nbytes": 8,
    }
    assert figures == derived | json.loads((bundle / MANIFEST).read_bytes())


@pytest.mark.parametrize("arguments", [["--unknown"], ["a", "b"]])
def test_wrong_usage_is_one_line_that_says_where_help_is(
    capsys: Capture, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; see stem-edge inspect --help")


from installed import DEMO


def test_cost_fits_a_terminal_and_names_the_sections(capsys: Capture) -> None:
    assert main(["inspect", str(DEMO), "--cost"]) == 0
    out = capsys.readouterr().out.replace(str(DEMO), "")
    assert max(map(len, out.splitlines())) <= 80
    for name in ("Table 1", "Table 3", "3.2.3"):
        assert name in out
    assert "17.6%" in out  # 384 / (4 x 128 + 2 x 256 + 3 x 384)
    lines = [line.split() for line in out.splitlines()]
    (total,) = (line[1:] for line in lines if line[:1] == ["parameters"] and len(line) == 3)
    paper, stored = (int(count.replace(",", "")) for count in total)
    assert paper - stored == 3 * 128 * 384  # the up projections that the tables replace

"""`stem-edge edit` and `generate --edit`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exports import contents
from installed import DEMO

import stem_edge
from stem_edge.commands.main import main
from stem_edge.text_table import columns

Capture = pytest.CaptureFixture[str]
PROMPT = "The capital of Spain is"
SPAIN = ("--source", "Spain", "--target", "Germany")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo in a folder of its own; the current folder is another one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return Path(shutil.copytree(DEMO, tmp_path / "models" / "demo"))


def run(capsys: Capture, *arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: object) -> str:
    """Run a command that must fail, and return its only line."""
    assert main([str(each) for each in arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("stem-edge: ")


@pytest.mark.slow
def test_an_edit_is_made_used_listed_and_removed(bundle: Path, capsys: Capture) -> None:
    before = contents(bundle)
    text = run(capsys, "edit", bundle, *SPAIN)
    assert "' Spain'          ->  ' Germany'" in text
    assert "'S', 'p', 'ain'   ->  ' Germany'" in text  # at the beginning of a text
    assert f"{bundle.parent / 'Spain-Germany.edit'}: 3" in text
    assert run(capsys, "generate", bundle, "-p", PROMPT, "-n", "4").startswith(" Madrid")
    for name in ("Spain-Germany", "Spain-Germany.edit", str(bundle.parent / "Spain-Germany")):
        edited = run(capsys, "generate", bundle, "-p", PROMPT, "-n", "4", "--edit", name)
        assert edited.startswith(" Berlin")
    assert "Spain -> Germany" in run(capsys, "edit", bundle, "--list")
    run(capsys, "edit", bundle, "--compare", PROMPT, "--edit", "Spain-Germany")
    removed = run(capsys, "edit", bundle, "--remove", "Spain-Germany")
    assert removed == f"removed {bundle.parent / 'Spain-Germany.edit'}\n"
    assert "no edits of this bundle" in run(capsys, "edit", bundle, "--list")
    assert list(bundle.parent.iterdir()) == [bundle]
    assert contents(bundle) == before


@pytest.mark.parametrize(
    ("options", "names", "given"),
    [
        (
            "--layers 1,5 --scheme pad-right --pad 7 --scope everywhere",
            ("New Zealand", "Spain"),
            {"layers": [1, 5], "scheme": "pad-right", "pad": 7, "scope": "everywhere"},
        ),
        (
            "--subset 1 --scheme subset --pad .",
            ("Spain", "New Zealand"),
            {"scheme": "subset", "subset": [1], "pad": "."},
        ),
    ],
)
def test_options_are_those_of_make_edit(
    bundle: Path, capsys: Capture, options: str, names: tuple[str, str], given: dict[str, Any]
) -> None:
    texts = ["--source", names[0], "--target", names[1], "-o", "an.edit"]
    run(capsys, "edit", bundle, *texts, *options.split())
    assert stem_edge.read_edit("an.edit") == stem_edge.make_edit(bundle, *names, **given)


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        ("New Zealand", "Spain", "--scope everywhere", "note: the source is several tokens"),
        ("New Zealand", "Spain", "--scope everywhere", "too: ' New', ' Zealand'"),
        # Behind a space both are one token, at the beginning of a text two and three.
        ("France", "Germany", "--scheme swap", "beginning of a text: no fit, so such prompts are"),
        ("Spain", "germany", "", "'Germany' into 1: did you mean that?"),
    ],
)
def test_notes_on_an_edit_are_printed(
    bundle: Path, capsys: Capture, source: str, target: str, options: str, said: str
) -> None:
    texts = ["--source", source, "--target", target]
    text = run(capsys, "edit", bundle, *texts, *options.split())
    assert said in " ".join(text.split())
    assert max(map(columns, text.splitlines()[:-2])) <= 80
    plain = run(capsys, "edit", bundle, *SPAIN, "--scope", "everywhere", "--force")
    assert "note:" not in plain and "did you mean" not in plain


def test_json_has_the_tokens(bundle: Path, capsys: Capture) -> None:
    made = json.loads(run(capsys, "edit", bundle, *SPAIN, "-o", "a.edit", "--json"))
    assert made["path"] == "a.edit"
    assert made["nbytes"] == Path("a.edit").stat().st_size
    assert (made["source"], made["target"], made["scope"]) == ("Spain", "Germany", "positions")
    cut = made["cuts"][0]
    assert (cut["before"], cut["scheme"]) == (" ", "swap")
    assert cut["looks_up"] == [[{"token_id": 617, "text": " Germany"}]]
    listed = json.loads(run(capsys, "edit", bundle, "--list", "--json"))
    assert [each["path"] for each in listed["edits"]] == ["a.edit"]
    assert (listed["of_other_bundles"], listed["damaged"]) == (0, [])
    found = json.loads(run(capsys, "edit", bundle, "--compare", PROMPT, "--edit", "a", "--json"))
    assert found["edited"]["top"][0]["text"] == " Berlin"
    assert found["edited_from_target"] < found["original_from_target"]
    assert found["path"] is None
    removed = json.loads(run(capsys, "edit", bundle, "--remove", "a", "--json"))
    assert removed == {"removed": ["a.edit"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do; give --source and --target, --list, --remove or --compare"),
        (["--source", "Spain"], "--source is given and --target is not"),
        (["--target", "Spain"], "--target is given and --source is not"),
        (["--layers", "1"], "--layers: only for a new edit"),
        (["--list", *SPAIN], "--source and --target: not for --list; leave this out"),
        (["--list", "--threads", "2"], "--threads: not for --list"),
        (["--remove", "x", "--top", "2"], "--top: not for --remove"),
        ([*SPAIN, "--edit", "x"], "--edit: only for --compare"),
        ([*SPAIN, "--no-prepare", "--plot", "x.png"], "--plot and --no-prepare: only for"),
        (["--compare", PROMPT], "--compare has no edit"),
        (["--compare", PROMPT, "--edit", "x", "--scheme", "swap"], "--scheme: only for a new"),
        (["--compare", PROMPT, *SPAIN, "--force"], "--force: nothing is written"),
        (["--compare", PROMPT, *SPAIN, "--plot", "x.gif"], "written as one of .png"),
        (["--compare", "The capital of Spian is", *SPAIN], "near it: 'Spian'"),
        (["--compare", PROMPT, "--edit", "x"], "x: no such edit file in"),
        ([*SPAIN, "--layers", "2"], "layers are 2; expected STEM layers of 1,3,5"),
        ([*SPAIN, "--layers", "1,"], "--layers '1,': not numbers"),
        ([*SPAIN, "--subset", "0"], "subset belongs to scheme subset"),
        (["--source", "\udcff", "--target", "x"], "not valid Unicode"),
        (["--compare", "Spain \udcff", *SPAIN], "not valid Unicode"),
        (["--remove", ""], "'': no such edit file"),
        (["--remove", "x" * 300], "no such edit file"),
    ],
)
def test_contradicting_options_are_one_line(
    bundle: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, "edit", bundle, *arguments)
    assert list(bundle.parent.iterdir()) == [bundle]
    assert list(Path().iterdir()) == []


def test_two_commands_at_once_are_a_usage_error(bundle: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["edit", str(bundle), "--list", "--remove", "x"])
    assert caught.value.code == 2


def test_where_an_edit_cannot_be_written(bundle: Path, capsys: Capture) -> None:
    Path("folder.edit").mkdir()
    Path("old.edit").write_text("old")
    Path("link.edit").symlink_to("nowhere")
    Path("inside").symlink_to(bundle)
    for out, message in (
        (bundle / "a.edit", "inside the bundle"),
        (bundle / "tables.zarr" / "a.edit", "inside the bundle"),
        ("inside/a.edit", "inside the bundle"),
        ("a.txt", "ends in .edit"),
        ("none/a.edit", "cannot write this edit"),
        ("folder.edit", "a folder"),
        ("old.edit", "exists; choose another name with -o, or add --force"),
        ("link.edit", "exists"),
    ):
        assert message in refused(capsys, "edit", bundle, *SPAIN, "-o", out)
    assert Path("old.edit").read_text() == "old"
    assert contents(bundle) == contents(DEMO)
    run(capsys, "edit", bundle, *SPAIN, "-o", "old.edit", "--force")
    assert stem_edge.read_edit("old.edit").scope == "positions"


@pytest.mark.slow
def test_comparing_writes_only_where_it_is_told_to(bundle: Path, capsys: Capture) -> None:
    command = ["edit", bundle, "--compare", PROMPT, *SPAIN]
    run(capsys, *command)
    assert list(bundle.parent.iterdir()) == [bundle]
    assert "a.edit: 3" in run(capsys, *command, "-o", "a.edit")
    assert stem_edge.read_edit("a.edit") == stem_edge.make_edit(bundle, "Spain", "Germany")
    other = ["edit", bundle, "--compare", "The capital of France is", *SPAIN, "-o", "b.edit"]
    assert "not in the prompt" in refused(capsys, *other)
    assert not Path("b.edit").exists()


def test_names_are_safe_for_files(bundle: Path, capsys: Capture) -> None:
    pairs = {
        ("../a", "b/c"): "___a-b_c.edit",
        (".x", "CON"): "_x-CON.edit",
        ("東京", "Côte d'Ivoire"): "東京-Côte_d_Ivoire.edit",
    }
    for (source, target), name in pairs.items():
        run(capsys, "edit", bundle, "--source", source, "--target", target, "--scheme", "average")
        assert (bundle.parent / name).is_file()
    long = "é" * 300
    run(capsys, "edit", bundle, "--source", long, "--target", long)
    found = run(capsys, "edit", bundle, "--list")
    assert f"{'é' * 50}-{'é' * 50}.edit" in found
    assert "東京 -> Côte d'Ivoire" in found


def test_the_list_counts_other_and_damaged_edits(
    bundle: Path, tiny_bundle: Path, capsys: Capture
) -> None:
    run(capsys, "edit", bundle, *SPAIN)
    stem_edge.make_edit(tiny_bundle, "a", "b").save("other.edit")
    Path("bad.edit").write_text("{")
    good = (bundle.parent / "Spain-Germany.edit").read_bytes()
    (bundle.parent / "worse.edit").write_bytes(good.replace(b"Germany", b"Germanz"))
    Path("folder.edit").mkdir()
    text = run(capsys, "edit", bundle, "--list")
    assert "Spain -> Germany" in text
    assert "1 of other bundles" in text
    assert "damaged: bad.edit: not an edit" in text
    assert "worse.edit: not an edit of format 1 (its" in " ".join(text.split())
    assert "folder" not in text.replace(str(bundle.parent), "")
    listed = json.loads(run(capsys, "edit", bundle, "--list", "--json"))
    assert (len(listed["edits"]), listed["of_other_bundles"], len(listed["damaged"])) == (1, 1, 2)
    assert listed["folders"] == [str(bundle.parent), str(Path.cwd())]


def test_only_edits_of_this_bundle_are_removed(
    bundle: Path, tiny_bundle: Path, capsys: Capture
) -> None:
    run(capsys, "edit", bundle, *SPAIN, "-o", "good.edit")
    stem_edge.make_edit(tiny_bundle, "a", "b").save("other.edit")
    Path("bad.edit").write_text("{")
    Path("notes").write_text("mine")
    before = contents(Path())
    for name, message in (
        ("other", "other.edit: this edit was made for other tables"),
        ("bad.edit", "bad.edit: not an edit"),
        ("notes", "notes: not an edit"),
        ("gone", "gone: no such edit file"),
        (str(bundle / "manifest.json"), "manifest.json: "),
        (str(bundle), "no such edit file"),
    ):
        assert message in refused(capsys, "edit", bundle, "--remove", "good", "--remove", name)
        assert contents(Path()) == before
    run(capsys, "edit", bundle, "--remove", "good", "--remove", "./good.edit")
    assert not Path("good.edit").exists()
    assert contents(bundle) == contents(DEMO)


def test_a_name_of_two_files_is_refused(bundle: Path, capsys: Capture) -> None:
    run(capsys, "edit", bundle, *SPAIN, "-o", "a.edit")
    shutil.copy("a.edit", bundle.parent / "a.edit")
    for arguments in (["edit", bundle, "--remove", "a"], ["generate", bundle, "--edit", "a"]):
        message = refused(capsys, *arguments)
        assert str(Path("a.edit").absolute()) in message
        assert str(bundle.parent / "a.edit") in message
    run(capsys, "edit", bundle, "--remove", "./a")
    assert (bundle.parent / "a.edit").is_file()
    Path("a.edit").symlink_to(bundle.parent / "a.edit")  # one file under two names
    assert run(capsys, "generate", bundle, "--edit", "a", "-p", PROMPT, "-n", "2")


def test_a_bundle_may_be_named_in_any_way(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source, folder, name in (
        ("Spain", bundle, "."),
        ("France", bundle / "tables.zarr", ".."),
        ("Peru", bundle.parent, "demo/"),
        ("Chile", bundle, "../demo"),
    ):
        monkeypatch.chdir(folder)
        run(capsys, "edit", name, "--source", source, "--target", "Germany")
        assert (bundle.parent / f"{source}-Germany.edit").is_file()
        assert f"{source} -> Germany" in run(capsys, "edit", name, "--list")
    assert contents(bundle) == contents(DEMO)


def test_generate_refuses_edits_before_it_loads(
    bundle: Path, tiny_bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("stem_edge.commands.running.generate.load", load)
    stem_edge.make_edit(tiny_bundle, "a", "b").save("other.edit")
    Path("bad.edit").write_text("{")
    for name, message in (
        ("other", "other.edit: this edit was made for other tables"),
        ("bad", "bad.edit: not an edit"),
        ("gone", "gone: no such edit file"),
    ):
        assert message in refused(capsys, "generate", bundle, "-p", PROMPT, "--edit", name)


def test_a_dense_model_has_no_edits(bundle: Path, dense_bundle: Path, capsys: Capture) -> None:
    assert "no rows that could be edited" in refused(capsys, "edit", dense_bundle, *SPAIN)
    run(capsys, "edit", bundle, *SPAIN, "-o", "a.edit")
    assert "1 of other bundles" in run(capsys, "edit", dense_bundle, "--list")


def test_an_edit_in_an_evaluation(bundle: Path, capsys: Capture) -> None:
    Path("text.txt").write_text("The capital of Spain is Madrid. The capital of France is Paris.")
    run(capsys, "edit", bundle, *SPAIN, "-o", "here.edit")
    run(capsys, "edit", bundle, *SPAIN, "-o", "a.edit", "--scope", "everywhere")
    command = ["eval", bundle, "--text", "text.txt", "--json"]
    (plain,) = json.loads(run(capsys, *command))
    (found,) = json.loads(run(capsys, *command, "--edit", "a", "--against", bundle))
    assert (plain["edits"], found["edits"]) == (0, 1)
    assert found["divergence"]["reference_perplexity"] == pytest.approx(plain["perplexity"])
    assert found["perplexity"] > 1.5 * plain["perplexity"]
    assert found["divergence"]["greatest"] > 5
    message = refused(capsys, *command, "--edit", "here")
    assert "give edits of scope everywhere" in message


@pytest.mark.slow
def test_without_a_terminal_and_with_arguments_that_are_not_unicode(bundle: Path) -> None:
    command = [sys.executable, "-m", "stem_edge", "edit", str(bundle)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for arguments, status, said in (
        ([*SPAIN, "-o", b"\xff.edit"], 0, b"\\udcff.edit: 3"),
        (["--list"], 0, b"Spain -> Germany"),
        (["--source", b"\xff", "--target", "x"], 1, b"not valid Unicode"),
        (["--remove", b"\xff"], 0, b"removed"),
    ):
        done = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
        )
        assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
        assert said in done.stdout + done.stderr
    assert list(Path().iterdir()) == []

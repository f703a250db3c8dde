"""The command line: arguments, output, exit status, interrupts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from installed import DEMO
from programs import HEEDING

import stem_edge
from stem_edge.commands.main import COMMANDS, main
from stem_edge.commands.options.answers import write_text

Capture = pytest.CaptureFixture[str]
GENERATE = ["generate", str(DEMO), "a"]


def test_generate_streams_text_and_ends_with_one_line_of_figures(capsys: Capture) -> None:
    assert main(["generate", str(DEMO), "-p", "The capital of France is", "-n", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" Paris.")
    assert out.endswith("\n")
    assert err.count("\n") == 1
    assert "tokens at" in err
    assert "read from flash" in err


def test_generate_json(capsys: Capture) -> None:
    arguments = ["-p", "The capital of France is", "-n", "3", "--json"]
    assert main(["generate", str(DEMO), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"].startswith(" Paris")
    assert len(result["token_ids"]) == 3
    assert result["finish_reason"] == "length"
    assert result["stats"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        [str(DEMO), "-n", "4", "The capital of Peru is", "--cache-dir", "x" * 300],
        ["--provider", "cpu", str(DEMO), "-p", "The capital of Peru is", "-n", "4"],
        ["The capital of Peru is", "--max-tokens", "4", "--quiet", "-c", "64", "-m", str(DEMO)],
    ],
)
def test_a_prompt_and_options_in_any_order(arguments: list[str], capsys: Capture) -> None:
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" Lima")
    assert ("tokens at" in err) != ("--quiet" in arguments)


def wait_until_idle(process: subprocess.Popen[str]) -> None:
    """Wait until everything is imported and the command waits for its prompt."""
    watched, used = psutil.Process(process.pid), -1.0
    for _ in range(60):
        time.sleep(1.5)
        before, used = used, sum(watched.cpu_times()[:2])
        if used == before and used > 0.1:
            return


@pytest.mark.slow
def test_interrupt_ends_cleanly() -> None:
    """It waits for its prompt then."""
    command = [sys.executable, "-c", HEEDING, "generate", str(DEMO)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_idle(process)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert process.communicate()[1] == "stem-edge: interrupted\n"
    assert process.returncode == 130


def test_interrupt_while_generating_still_gives_the_figures(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))

    def write(text: str) -> None:
        write_text(text)
        if next(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("stem_edge.commands.running.generate.write_text", write)
    assert main(["generate", str(DEMO), "-p", "The capital of France is"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith(" Paris")
    assert "tokens at" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nowhere", "-p", "a"], "/nowhere: no such bundle folder"),
        (["generate", str(DEMO.parent), "-p", "a"], "not a bundle, it has no manifest.json"),
        ([*GENERATE, "--temp", "-1"], "--temperature is -1.0; expected a number"),
        ([*GENERATE, "-n", "-1"], "to 2147483647; a large number fills the context"),
        ([*GENERATE, "--top-k", "-1"], "to 2147483647; 0 is all"),
        ([*GENERATE, "-s", "-1"], "leave it out for a random one"),
        ([*GENERATE, "-c", "0"], "--context-length is 0; this model takes 1 to 256; leave it out"),
        (["run", str(DEMO), "-"], "the text is '-', expected words; leave it out"),
        (["run", "small:1b"], "or hf:org/name, or a name that stem-edge list shows"),
        ([*GENERATE, "-p", "b"], "more than one prompt; give it by position or with -p"),
        ([*GENERATE, "--resident", "--slots", "9"], "--slots is 9, but resident keeps the rows"),
        ([*GENERATE, "--engine", "ggml"], "no backbone for ggml"),
        ([*GENERATE, "--memory", "600"], "size '600' has no unit; write for example 600MB"),
        (["prepare", str(DEMO), "--cache-dir", "/proc/x"], "give another folder with --cache-dir"),
        (["generate", str(DEMO), "a " * 500], "holds 256; shorten it: this model takes no longer"),
        (
            ["generate", str(DEMO), "a " * 500, "--context-length", "9"],
            "with a larger --context-length (up to 256)",
        ),
        (["export", "/nowhere", "/tmp/never"], "/nowhere: no such checkpoint"),
        (["run", "--model=/nowhere", "a"], "/nowhere: no such bundle folder"),
        (["run", "hf.co/org/name"], "or a GGUF file, or hf:org/name"),
        (["run", "https://huggingface.co/org/name/tree/main"], "GGUF file, or hf:org/name"),
        (["export", "hf.co/org/name:Q4_K_M", "b"], "did you mean hf:org/name? else"),
        (["demo", "--slots", "0"], "--slots is 0; expected 4 to 1756"),
        ([*GENERATE, "--memory", "5kB"], "memory of 5 kB is too small"),
    ],
)
def test_errors_are_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("stem-edge: ")
    assert message in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--inpu a", "unrecognized arguments: --inpu a; see"),
        ("--max-token 4", "did you mean --max-tokens?"),
        ("--unlike-any 4", "unrecognized arguments: --unlike-any 4; see"),
        ("inspect a --cots", "arguments: --cots; did you mean --cost? see stem-edge inspect"),
        ("-m model", "name a command before options and models, like stem-edge run MODEL"),
        ("lits", "there is no command 'lits'; did you mean list?"),
        ("-t 0.7", "-t/--threads: expected a whole number, found '0.7'"),
        ("-n x", "argument -n/--max-new-tokens: expected a whole number"),
        ("b -- -f", "unrecognized arguments: b -- -f"),
    ],
)
def test_unknown_options_and_commands(words: str, said: str, capsys: Capture) -> None:
    command = GENERATE if words.split()[0] not in {*COMMANDS, "-m", "lits"} else []
    with pytest.raises(SystemExit):
        main([*command, *words.split()])
    assert said in capsys.readouterr().err


# A command, how its error goes on, and what users of llama.cpp, Ollama and mlx-lm type.
FOREIGN = """\
run a | use --context-length N; | --ctx --context --fit-ctx --max-model-len
run a | use --threads N; | -tb --num-thread --threads-batch
run a | use --memory SIZE | -b -ub --batch-size --ram --num_batch
run a | use --provider NAME, which runs all layers | -ngl --n-gpu-layers --gpu --num_gpu --device
run a | use --kv TYPE | -ctk --cache-type-k --kv-bits
run a | use --speculate N | -md --model-draft --draft --draft-max --num-draft-tokens
run a | use --min-p X | --mirostat --typical --xtc-probability
run a | use --schema FILE | -j --format
run a | use --repetition-penalty X, which counts | --repeat-last-n --repeat_last_n
run a | use --no-thinking | --hidethinking --nothink
run a | use --json | --verbose --no-stream
run a | stem-edge export takes --type TYPE | --bits --quantize --dtype
run a | stem-edge generate continues a text | -no-cnv --ignore-chat-template
run a | otherwise write > FILE | -o --output
run a | leave it out | -fa --color --swa-full --jinja --rope-freq-base --keepalive --log-level --trust-remote-code --verbose-prompt
serve a | use --api-key-file FILE, because | --api-key
serve a | and each request to serve, take --max-new-tokens N (in a request: max_tokens) | --max-tokens
edit a | use --out FILE | --output
export a b | use --type TYPE | -q --q-bits --bits --outtype --dtype
measure a | use --rounds N | -r
batch a b c | use --sequences N | --concurrency
  | stem-edge rm NAME | delete remove
  | fetches the model, too | pull download
  | stem-edge export makes a bundle | create convert quantize
  | stem-edge --help | help
  | a model is loaded only while | ps stop
"""


@pytest.mark.parametrize("case", FOREIGN.splitlines())
def test_options_of_other_programs_name_ours(case: str, capsys: Capture) -> None:
    command, said, names = case.split(" | ")
    for name in names.split():
        with pytest.raises(SystemExit):
            main([*command.split(), name, "1"])
        assert re.search(rf"there is no .*{name}\b.*; .*{re.escape(said)}", capsys.readouterr().err)


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_teaches(
    name: str, columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: stem-edge {name}" in out
    assert max(map(len, out.splitlines())) <= columns
    assert len(out.splitlines()) <= 40 or columns < 80
    assert not re.search(r"-$", out, re.MULTILINE)  # options are not broken in two


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == stem_edge.__version__


INTERRUPTED = """import signal, stem_edge.commands.main as main
main.import_module = lambda _: (signal.raise_signal(signal.SIGINT), print("found"))"""
FAILING = "from stem_edge.commands.bundles import list as it\ndef run(_): print('found'); raise {}\nit.run = run"


@pytest.mark.parametrize(
    ("code", "words", "done", "said"),
    [
        ("sys.modules['starlette'] = None", ["serve", "a"], (1, ""), "install 'stem-edge[server]'"),
        (FAILING.format("PermissionError(13, 'no')"), ["list"], (1, "found\n"), "stem-edge: no\n"),
        (FAILING.format("BrokenPipeError"), ["list"], (141, ""), ""),
        (FAILING.format("it.BundleError from KeyboardInterrupt"), ["list"], (130, "found\n"), "in"),
        (INTERRUPTED, ["list"], (130, "found\n"), "interrupted"),
    ],
)
def test_errors_of_the_system(code: str, words: list[str], done: object, said: str) -> None:
    code = f"import sys\n{code}\nfrom stem_edge.commands.main import main\nsys.exit(main({words}))"
    command = [sys.executable, "-E", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == done
    assert said in ended.stderr and ended.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/proc/out"], "/proc: cannot write here ("),
        (["OUT", "--type", "q4_0"], "--type is 'q4_0'; expected one of small, balanced"),
        (["OUT", "--engine", "ggml", "--no-prefill-graph"], "--prefill-graph: for the engine onnx"),
        (["OUT", "--tables-only", "--no-prefill-graph"], "--prefill-graph is for bundles"),
    ],
)
def test_exports_that_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    out = arguments[0].replace("OUT", str(tmp_path / "out"))
    assert main(["export", str(tiny_checkpoint), out, *arguments[1:]]) == 1
    assert message in capsys.readouterr().err


def test_demo_runs_and_says_what_to_do_next(capsys: Capture) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert " Paris." in out
    assert out.count("read from flash") == 3
    assert "  stem-edge export CHECKPOINT OUT" in out

"""`stem-edge run` at a terminal and with pipes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from chats import thinking, write_chat_bundle
from installed import DEMO
from loading import load_fixed
from terminal import CTRL_C, CTRL_D, Terminal

import stem_edge
from stem_edge import Chunk, Model, SamplingParams
from stem_edge.commands.main import main
from stem_edge.commands.running.run.command import take
from stem_edge.commands.running.run.input import Typed
from stem_edge.commands.running.run.session import Session
from stem_edge.runtime.conversations.conversation import Conversation

Capture = pytest.CaptureFixture[str]
FRANCE, PERU = "The capital of France is", "The capital of Peru is"
# Slow enough to press Ctrl-C while it answers.
SLOWLY = """
import sys, time
from stem_edge.commands.main import main
from stem_edge.commands.running.run import command
real = command.load
def slowly(chunks):
    for chunk in chunks:
        time.sleep(0.05)
        yield chunk
def load(*args, **options):
    model = real(*args, **options)
    generate = model.generate
    model.generate = lambda *args, **options: slowly(generate(*args, **options))
    return model
command.load = load
sys.exit(main())
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_bundle(tmp_path_factory.mktemp("chat"))


def piped(monkeypatch: pytest.MonkeyPatch, text: str | bytes, *arguments: str | Path) -> int:
    """Run the command on a text in stdin."""
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    chosen = [] if "--temp" in arguments else ["--temp", "0"]
    return main(["run", *map(str, arguments), *chosen])


def test_a_line_is_a_message_and_stdout_has_the_answers_alone(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = "stem-edge: note: cut at 3 tokens (--max-new-tokens)\n"
    assert piped(monkeypatch, f"{FRANCE}\n\n{PERU}", bundle, "-n", "3") == 0
    out, err = capsys.readouterr()
    assert err == 2 * cut
    assert [line[:4] for line in out.splitlines()] == [" Par", " Lim"]
    assert piped(monkeypatch, PERU, bundle, FRANCE, "-n", "3") == 0
    assert capsys.readouterr() == (f"{out.splitlines()[0]}\n", cut)
    assert sys.stdin.read() == PERU


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ('"""\na\n\n/undo\\\n"""\nb', ["a\n\n/undo\\", "b"]),
        (" /undo", [" /undo"]),
        # The end of the input ends a message, too.
        ('"""\na\nb', ["a\nb"]),
        ('\n"""\n"""\n  \n', []),
    ],
)
def test_messages_of_several_lines(
    monkeypatch: pytest.MonkeyPatch, typed: str, sent: list[str]
) -> None:
    found: list[str] = []

    def load(*given: Any, **named: Any) -> Model:
        model = stem_edge.load(*given, **named)
        begin = model.conversation

        def conversation(*given: Any, **named: Any) -> Conversation:
            talk = begin(*given, **named)
            send = talk.send
            talk.send = lambda text, *more: found.append(text) or send(text, *more)  # type: ignore
            return talk

        model.conversation = conversation  # type: ignore[method-assign]
        return model

    monkeypatch.setattr("stem_edge.commands.running.run.command.load", load)
    assert piped(monkeypatch, typed, DEMO, "-n", "1") == 0
    assert found == sent


def test_json_has_an_object_for_each_answer_and_each_error(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = f"{FRANCE}\n/retry\n<|fim_prefix|>\n{PERU * 60}\n{PERU}\n"
    assert piped(monkeypatch, typed, bundle, "-n", "2", "--json") == 1
    out, err = capsys.readouterr()
    first, again, special, long, last = map(json.loads, out.splitlines())
    assert first["text"] == again["text"]
    assert len(first["token_ids"]) == 2
    assert first["finish_reason"] == "length"
    assert last["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    assert "names the special token" in special["error"]
    assert "the context holds 256" in long["error"]
    assert "the same answer again" in err


def test_commands(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    talk, note = tmp_path / "talk", tmp_path / "note.txt"
    note.write_text("mine")
    typed = f"{FRANCE}\n/system Be short.\n/save {talk}\n/undo\n/undo\n{PERU}\n"
    typed += f"/load {talk}\n/retry\n/save {talk}\n/save {note}\n/save\n/load {note}\n/load x/y\n"
    typed += f"/load {tmp_path}\n/save {tmp_path}/x/y\n/new\n/clear\n/system\n/help\n/retr\n/xyz\n"
    assert piped(monkeypatch, f"{typed}/exit\n{PERU}", bundle, "-n", "2", "--temp", "0") == 1
    out, err = capsys.readouterr()
    assert [line[:2] for line in out.splitlines()] == [" P", " L", " P"]
    lines = iter(err.splitlines())
    for part in [
        "the system message is set",
        f"saved 3 messages as {talk}",
        f"taken back: {FRANCE}",
        "no message of the user yet",
        "loaded 3 messages",
        "the last, by assistant:  P",
        "the same answer again; /set temperature 0.7",
        f"saved 3 messages as {talk}",
        "exists, and is not this conversation",
        "no file; give its name",
        f"{note}: not a saved conversation",
        "x/y: cannot read (No such file",
        f"{tmp_path}: cannot read (not a regular file)",
        "x/y: cannot write (No such file",
        "a new conversation",
        "a new conversation",
        "there is no system message now",
        "/undo ",
        "no command '/retr'; try /retry",
        "no command '/xyz'; /help lists all",
    ]:
        assert any(part in line for line in lines), part
    with load_fixed(bundle) as model:
        roles = [message["role"] for message in model.load_conversation(talk).messages]
    assert roles == ["system", "user", "assistant"]
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (b"\xff\n", [], "stem-edge: messages[0].content is not valid Unicode"),
        ("x" * 600_000, [], "a message of more than 524,288 characters"),
        ('"""\n' + "x\n" * 300_000, [], "a message of more than 524,288 characters"),
        ("", [FRANCE, "-p", PERU], "more than one prompt"),
        (FRANCE * 60, [], "/undo or /new), or shorten it: this model takes no longer context\n"),
        (FRANCE, ["--context-length", "4"], "or load with a larger --context-length (up to 256)"),
    ],
)
def test_what_is_refused(
    bundle: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    text: str | bytes,
    arguments: list[str],
    message: str,
) -> None:
    assert piped(monkeypatch, text, bundle, *arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_conversation_at_a_terminal(bundle: Path) -> None:
    options = ["-n", "200", "--temp", "9", "--seed", "1"]
    with Terminal([sys.executable, "-c", SLOWLY, "run", str(bundle), *options]) as terminal:
        assert "A context of 256 tokens; temperature 9, top_p 0.95. /help lists" in terminal.until(
            "> "
        )
        terminal.press(f"{FRANCE}\n")
        terminal.until(f"{FRANCE}\r\n")
        assert len(terminal.until(" ")) < 200
        terminal.press(CTRL_C)
        terminal.until("prompt 6 tokens")
        terminal.until("stopped")
        terminal.until("> ")
        terminal.press("/undo\n")
        terminal.until(f"taken back: {FRANCE}")
        terminal.until("> ")
        # At the prompt, Ctrl-C clears the line.
        terminal.press(f"nothing of this{CTRL_C}")
        terminal.until("Ctrl-C again or Ctrl-D ends")
        terminal.until("> ")
        terminal.press(f'"""\n{FRANCE}\nor not\n')
        terminal.until("or not\r\n")
        terminal.until(". ")
        terminal.press(CTRL_D)  # the end of the message
        terminal.until(" ")
        terminal.press(CTRL_C)
        terminal.until("stopped")
        terminal.until("> ")
        terminal.press(CTRL_D)
        assert terminal.status() == 0


def test_ctrl_c_before_an_answer_says_that_the_message_is_gone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> Generator[Chunk]:
        raise KeyboardInterrupt

    with load_fixed(DEMO) as model:
        talk = model.conversation()
        monkeypatch.setattr(talk, "send", send)
        session = Session(model, talk, SamplingParams(), True, False, True, explain=str)
        take(session, Typed(FRANCE, is_command=False))
        assert "the message is not kept" in capsys.readouterr().err
        session.interactive = False
        with pytest.raises(KeyboardInterrupt):
            take(session, Typed(FRANCE, is_command=False))


@pytest.mark.slow
def test_escapes_in_answers_do_not_reach_a_terminal() -> None:
    script = "from stem_edge.commands.options.answers import write_text; write_text('a\\x1b[31m\\tb\\n\\x9b')"
    with Terminal([sys.executable, "-c", script]) as terminal:
        assert terminal.status() == 0
    assert terminal.shown == "a\\x1b[31m\tb\r\n\\x9b"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode() == f"a\x1b[31m\tb{os.linesep}\x9b"


def test_thoughts_are_folded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thinking(tmp_path) as bundle:
        assert piped(monkeypatch, FRANCE, bundle, "-n", "11", "--thinking", "--quiet") == 0
        assert capsys.readouterr() == ("in Europe.\n", "")
        assert piped(monkeypatch, FRANCE, bundle, "-n", "11", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["thoughts"], told["text"]) == ("Paris. It is a", "in Europe.")
        with load_fixed(bundle) as model:
            params = SamplingParams(max_new_tokens=11)
            session = Session(model, model.conversation(), params, True, False, True, explain=str)
            take(session, Typed(FRANCE, is_command=False))
    out, err = capsys.readouterr()
    assert out == "in Europe.\n"
    assert re.fullmatch(r"(\rthinking: \d+ tokens)+\n", err)


SET = [
    ("/set", "max_new_tokens 1024, temperature 0"),
    ("/set top_p 0.5", "greedy, so top_p changes nothing until /set temperature 0.7"),
    ("/set temperature 0.5", "temperature 0.5"),
    ("/set --top-k 40", "top_k 40"),
    ("/set max_new_tokens 2", "max_new_tokens 2"),
    (f"/set seed {'1' * 5000}", "expected a whole number, like /set seed 1"),
    (
        "/set temp 1",
        "no option is called 'temp'; did you mean temperature? expected one of 'max_new_tokens'",
    ),
    ("/set top_k 0.5", "top-k is '0.5'; expected a whole number, like"),
    ("/set temperature", "temperature is ''; expected a number, like"),
    ("/set temperature -1", "temperature is -1.0; expected"),
    ("/set parameter top_k 5", "'parameter'; try /set NAME VALUE; expected one of"),
    ("/set system x", "'system'; try /system TEXT; expected"),
    ("/set num_ctx 9", "start with --context-length N"),
    ("/regen", "there is no command '/regen'; try /retry"),
    ("/read x", "paste the text between"),
    ("/sett", "there is no command '/sett'; try /set"),
    ("/by", "there is no command '/by'; try /bye"),
]


def test_set(bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, "\n".join(line for line, _ in SET), bundle)
    lines = iter(capsys.readouterr().err.splitlines())
    for line, said in SET:
        assert any(said in one for one in lines), line

"""What is typed in `stem-edge chat`: answers to messages, and the commands that begin with /."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stem_edge.commands.answers import as_object, dim, write_text
from stem_edge.commands.chat_input import Typed
from stem_edge.errors import DeviceLostError, InputError, StemEdgeError
from stem_edge.files.disk import read_file
from stem_edge.files.strict_json import one_line
from stem_edge.files.whole_file import write_whole
from stem_edge.runtime.conversation import Conversation
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import SamplingParams
from stem_edge.runtime.stats import GenerationStats
from stem_edge.text.chat_template import checked_messages
from stem_edge.text_table import cut, fill, printable, shown, shown_lines

MAX_FILE_NBYTES = 16 << 20
EXIT = "/exit"

# Command, as it is typed -> what it does.
HELP = {
    "/undo": "take the last message and its answer back",
    "/retry": "answer the last message again",
    "/new": "forget all messages but the system message",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/save FILE": "save the conversation",
    "/load FILE": "go on with a saved conversation",
    "/stats": "all figures of the last answer",
    "/help": "show this",
    EXIT: "end, as Ctrl-D does",
}
KEYS = '''\
A message ends with its line, unless that ends with \\. Lines between two lines of """ are one
message. A message that begins with / needs a space before it.
Ctrl-C stops an answer.'''


@dataclass
class Session:
    """A conversation and how to print it.

    figures: print a line of figures after each answer. explain: error messages for this command.
    """

    model: Model
    conversation: Conversation
    params: SamplingParams
    interactive: bool
    as_json: bool
    figures: bool
    explain: Callable[[str], str]
    failed: bool = False  # whether a message or a command was refused

    def take(self, typed: Typed) -> bool:
        """Answer a message or obey a command; return False to end.

        At a terminal, Ctrl-C ends only the answer.
        """
        count = len(self.conversation.messages)
        try:
            if typed.is_command:
                return self._obey(typed.text)
            self._answer(self.conversation.send(typed.text, self.params))
        except DeviceLostError:
            raise
        except StemEdgeError as error:
            self.fail(error)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            lost = not typed.is_command and len(self.conversation.messages) == count
            _tell(dim("stopped before an answer; the message is not kept" if lost else "stopped"))
        return True

    def fail(self, error: StemEdgeError) -> None:
        """Print an error after which the conversation goes on."""
        self.failed = True
        message = self.explain(str(error))
        if self.as_json:
            print(json.dumps({"error": message}, ensure_ascii=False), flush=True)
        else:
            _tell(f"stem-edge: {message}")

    def _answer(self, chunks: Generator[Chunk]) -> None:
        """Print an answer as it comes, and its figures, also if it is cut short."""
        done: list[Chunk] = []
        try:
            for chunk in chunks:
                done.append(chunk)
                if not self.as_json:
                    write_text(chunk.text)
        finally:
            chunks.close()
            if done:
                self._complete(done)

    def _complete(self, done: list[Chunk]) -> None:
        if self.as_json:
            answer = as_object(done, self.model.stats)
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            write_text("\n")
        if self.figures:
            _tell(dim(_figures(self.model.stats) + self._why_cut(done)))

    def _why_cut(self, done: list[Chunk]) -> str:
        if done[-1].finish_reason != "length":
            return ""
        if self.model.stats.new_tokens == self.params.max_new_tokens:
            return f"; cut at {self.params.max_new_tokens} tokens (--max-new-tokens)"
        return f"; the context of {self.model.plan.context_length} tokens is full (/undo or /new)"

    def _obey(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        commands = {
            "/undo": self._undo,
            "/retry": self._retry,
            "/new": self._new,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/help": self._help,
        }
        if name in commands:
            commands[name](argument.strip())
        elif name != EXIT:
            raise _unknown(name, [*commands, EXIT])
        return name != EXIT

    def _undo(self, _: str) -> None:
        _tell(dim(f"taken back: {cut(printable(self.conversation.undo()), 60, '...')}"))

    def _retry(self, _: str) -> None:
        chunks = self.conversation.retry(self.params)
        if self.params.temperature == 0 or self.params.seed is not None:
            again = "give --temperature, and no --seed, to get others"
            _tell(dim(f"with these options the answer is the same again; {again}"))
        self._answer(chunks)

    def _new(self, _: str) -> None:
        messages = self.conversation.messages
        messages[:] = [message for message in messages[:1] if message["role"] == "system"]
        _tell(dim("a new conversation"))

    def _system(self, text: str) -> None:
        self._new_system(text)
        _tell(dim("the system message is set" if text else "there is no system message now"))

    def _new_system(self, text: str) -> None:
        messages = self.conversation.messages
        old = 1 if messages and messages[0]["role"] == "system" else 0
        messages[:old] = [{"role": "system", "content": text}] if text else []

    def _save(self, name: str) -> None:
        path = _path(name)
        save_messages(path, self.conversation.messages)
        _tell(dim(f"saved {len(self.conversation.messages)} messages as {printable(name)}"))

    def _load(self, name: str) -> None:
        messages = self.conversation.messages
        messages[:] = load_messages(_path(name))
        _tell(dim(f"loaded {len(messages)} messages"))
        if messages:
            last = messages[-1]
            _tell(dim(f"the last, by {last['role']}: {shown_lines(last['content'])}"))

    def _stats(self, _: str) -> None:
        stats = self.model.stats
        used = stats.prompt_tokens + stats.new_tokens
        _tell(stats.line() if used else "no answer yet")
        _tell(f"context: {used} of {self.model.plan.context_length} tokens")

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        _tell("\n".join(f"{fill(name, width)}  {what}" for name, what in HELP.items()))
        _tell(KEYS)


def _figures(stats: GenerationStats) -> str:
    """Speeds and row hits of an answer, in less than a line."""
    kept = f" ({stats.cached_tokens} kept)" if stats.cached_tokens else ""
    prompt = f"prompt {stats.prompt_tokens} tokens{kept} at {stats.prefill_tokens_per_second:.0f}/s"
    answer = f"answer {stats.new_tokens} at {stats.decode_tokens_per_second:.1f}/s"
    rows = f"rows {stats.hit_rate:.0%} hits" if stats.row_hits + stats.row_misses else ""
    return ", ".join(filter(None, (prompt, answer, rows)))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _unknown(name: str, commands: list[str]) -> InputError:
    near = difflib.get_close_matches(name, commands, 1)
    hint = f"try {near[0]}" if near else "/help lists all"
    return InputError(
        f"there is no command {shown(name)}; {hint}, or put a space before / to send a message"
    )


def _path(name: str) -> Path:
    if not name or "\0" in name:
        raise InputError("no file; give its name after the command, like /save talk.json")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # for a user that there is not
        raise InputError(f"{shown(name)}: {error} give another file") from None


def save_messages(path: Path, messages: list[dict[str, str]]) -> None:
    """Save a conversation as JSON. Replaces no file that is something else. Raises InputError."""
    try:
        if path.exists():
            load_messages(path)
        write_whole(path, json.dumps(messages, ensure_ascii=False, indent=1).encode())
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror}); give another file") from None


def load_messages(path: Path) -> list[dict[str, str]]:
    """Load what save_messages saved. Raises InputError."""
    try:
        data = read_file(path, MAX_FILE_NBYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give another file") from None
    try:
        messages = msgspec.json.decode(data)
        return [] if messages == [] else checked_messages(messages)
    except (ValueError, RecursionError) as error:  # errors of msgspec are ValueErrors
        raise InputError(
            f"{path}: not a saved conversation ({one_line(error)}); give another file"
        ) from None

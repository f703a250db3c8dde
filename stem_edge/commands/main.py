"""The command `stem-edge`: find a command by its name, import it, run it and report its errors."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import ModuleType

import stem_edge
from stem_edge.commands.options.arguments import Parser, with_options
from stem_edge.errors import FarError, StemEdgeError
from stem_edge.foreign import replacement
from stem_edge.shown import printable, shown

# Name of a command and of its module -> folder of the module, and the command's line in --help.
COMMANDS = {
    "demo": ("running", "see it work on the small model in this package"),
    "export": ("bundles", "convert a trained checkpoint to a bundle"),
    "generate": ("running", "continue a text"),
    "run": ("running", "chat with a model, or answer one message"),
    "serve": ("running", "serve a model by OpenAI's interface, and a chat page"),
    "batch": ("running", "run every prompt in a file; resumable"),
    "inspect": ("bundles", "show what a bundle is made of"),
    "verify": ("bundles", "check a bundle"),
    "edit": ("bundles", "make one word use another word's table rows"),
    "fit": ("measuring", "plan how to run a model on a device, without running it"),
    "measure": ("measuring", "measure time and memory, and compare ways to run"),
    "eval": ("measuring", "measure perplexity, and divergence from a checkpoint"),
    "prepare": ("bundles", "rearrange a backbone for this processor now"),
    "list": ("bundles", "list the stored models, with their short names"),
    "rm": ("bundles", "delete a stored model, or files that make loads faster"),
}
# Ollama's name of a command -> ours.
SYNONYMS = {"ls": "list", "show": "inspect"}
# Command -> extra of the package that it needs.
EXTRAS = {"serve": "server"}

DESCRIPTION = """\
Run language models that are bigger than your memory: Gemma 3n and 4, STEM, and
dense ones. A checkpoint (Hugging Face, GGUF, STEM) is exported once, to a
bundle that the other commands run; commands that run one do this themselves."""

EPILOG = """\
first steps:
  stem-edge demo
  stem-edge run FILE.gguf
  stem-edge run hf:org/name "Once upon a time"

`stem-edge COMMAND --help` explains a command."""

MORE_MEMORY = "free some, or raise the limit of this process (ulimit -v)"
EXIT_ERROR = 1
EXIT_FAR = 3  # an export would diverge from its checkpoint more than allowed
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141  # 128 + SIGINT or SIGPIPE, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, rest = _parse_name(arguments)
    parser = Parser(f"stem-edge {known}")
    warnings.showwarning = partial(_show_warning, parser)
    _prepare_process()
    try:
        with _interrupts_held():
            command = _import(known)
        parser.description, parser.epilog = command.DESCRIPTION, getattr(command, "EPILOG", None)
        command.add_arguments(parser)
        status: int = command.run(parser.parse(rest))
        if sys.stdout is not None:
            sys.stdout.flush()  # now, because Python's own flush at exit would print a traceback
        return status
    except (StemEdgeError, KeyboardInterrupt, ImportError, MemoryError) as error:
        if _was_interrupted(error):
            print("stem-edge: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        if isinstance(error, StemEdgeError):
            message = " ".join(str(error).split())
            print(f"stem-edge: {printable(with_options(parser, message))}", file=sys.stderr)
            return EXIT_FAR if isinstance(error, FarError) else EXIT_ERROR
        if _lacks_memory(error):
            print(f"stem-edge: no memory left; {MORE_MEMORY}", file=sys.stderr)
            return EXIT_ERROR
        raise
    except OSError as error:
        # Say nothing about a broken pipe, because `| head` ends that way.
        if not (broken := isinstance(error, BrokenPipeError)):
            where = f"{error.filename}: " if error.filename else ""
            print(f"stem-edge: {printable(f'{where}{error.strerror or error}')}", file=sys.stderr)
            with suppress(OSError):
                sys.stdout.flush()
        # Otherwise Python would fail again at its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE if broken else EXIT_ERROR


def _was_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused this error. An interrupted import may raise another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _lacks_memory(error: BaseException) -> bool:
    """Return True if memory ran out: a MemoryError, or an ImportError of a native library."""
    unmapped = ("failed to map", "allocate memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(words in str(error) for words in unmapped)


def _prepare_process() -> None:
    """Escape characters that the terminal cannot show, and end cleanly on SIGTERM and SIGHUP."""
    # Replace closed streams. Otherwise the next opened file would get their descriptor and all output.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, _end)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a block, because interrupted imports fail in many ways."""
    held, before = list[int](), signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _show_warning(parser: Parser, message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line, without the source code that Python adds."""
    text = with_options(parser, " ".join(str(message).split()))
    print(f"stem-edge: note: {printable(text)}", file=sys.stderr)


def _parse_name(arguments: list[str]) -> tuple[str, list[str]]:
    parser = Parser("stem-edge", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=stem_edge.__version__)
    names = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, line) in COMMANDS.items():
        names.add_parser(name, help=line, add_help=False)
    if not arguments:
        parser.print_help()
        raise SystemExit(2)
    # Parse only the name, because the options belong to the parser of the command.
    first = SYNONYMS.get(arguments[0], arguments[0])
    if first not in COMMANDS and (hint := _hint(first)):
        parser.error(f"there is no command {shown(first)}; {hint}")
    return str(parser.parse_args([first]).command), arguments[1:]


def _hint(word: str) -> str:
    """Return what to type instead of an unknown command; "" to let argparse list all commands."""
    if word in ("-h", "--help", "--version"):
        return ""
    if word.startswith(("-", "hf:")) or "." in word or "/" in word:
        return "name a command before options and models, like stem-edge run MODEL"
    near = get_close_matches(word, COMMANDS, 1)
    return replacement(word, ()) or "".join(f"did you mean {name}?" for name in near)


def _import(name: str) -> ModuleType:
    module = f"stem_edge.commands.{COMMANDS[name][0]}.{name}"
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is None or error.name.startswith("stem_edge") or name not in EXTRAS:
            raise
        raise StemEdgeError(
            f"`stem-edge {name}` needs the package {error.name}; "
            f"install it with: pip install 'stem-edge[{EXTRAS[name]}]'"
        ) from error

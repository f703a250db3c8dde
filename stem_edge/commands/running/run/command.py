"""The command `stem-edge run`: chat with a model."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from stem_edge.commands.options.answers import (
    add_sampling,
    add_text,
    check_grammar,
    given_text,
    sampled,
    sampling_params,
)
from stem_edge.commands.options.arguments import with_options
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.commands.running.run.input import Typed, TypedLines
from stem_edge.commands.running.run.session import Session
from stem_edge.commands.running.run.typed_commands import ENDS, obey
from stem_edge.errors import DeviceLostError, InputError, StemEdgeError
from stem_edge.runtime import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.sampling import CONVERSATION

MAX_NEW_TOKENS = 1024
DESCRIPTION = """\
Chat with a model, or answer MESSAGE and end. At a terminal, Ctrl-C stops an
answer, /help lists commands, and Ctrl-D ends. Otherwise each line of stdin is a
message."""

EPILOG = """\
examples:
  stem-edge run model "What is the capital of Spain?"
  stem-edge run model --system "Answer in one sentence." --temp 0.7 --top-p 0.9"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add_text(add, "MESSAGE", "message to answer")
    add(
        "--system",
        "-sys",
        "--system-prompt",
        metavar="TEXT",
        help="system message, which comes before all others",
    )
    thinking = "let the model think before it answers, or not"
    add("--thinking", action=argparse.BooleanOptionalAction, help=thinking)
    add("--json", action="store_true", help="print a JSON object for each answer")
    add("-q", "--quiet", action="store_true", help="print no figures or notes after answers")
    add_sampling(parser.add_argument_group("choosing tokens"), MAX_NEW_TOKENS)
    add_loading(parser.add_argument_group("loading"))
    parser.set_defaults(explain=partial(with_options, parser))


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    message = given_text(args)
    interactive = (
        message is None and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    )
    system = [{"role": "system", "content": args.system}] if args.system else []
    with load(args.bundle, **loading_options(args)) as model:
        check_grammar(model, params, args)
        params = model.chosen(params, CONVERSATION)
        thinking = {} if args.thinking is None else {"enable_thinking": args.thinking}
        with model.conversation(system, template_arguments=thinking) as conversation:
            session = Session(
                model, conversation, params, interactive, args.json, args.quiet, args.explain
            )
            if interactive:
                session.tell(_welcome(model, params))
            if message is not None:
                take(session, Typed(message, is_command=False))
            else:
                _converse(session, TypedLines(interactive))
        return 1 if session.failed and not interactive else 0


def _welcome(model: Model, params: SamplingParams) -> str:
    context = f"A context of {model.plan.context_length} tokens; {sampled(params)}."
    lines = [f"{context} /help lists commands; Ctrl-D ends."]
    if not model.has_chat_template:
        lines.append("This model has no chat template: it continues the texts as they are.")
    return "\n".join(lines)


def _converse(session: Session, typed: TypedLines) -> None:
    interrupted = False  # True after Ctrl-C, until a line is read
    while True:
        try:
            line = typed.read()
            interrupted = False
            if line is None or (line.is_command and line.text.split()[0] in ENDS):
                return
            take(session, line)
        except InputError as error:  # of a message that is too long
            if not session.interactive:
                raise
            session.fail(error)
        except KeyboardInterrupt:
            if not session.interactive:
                raise
            session.tell("")
            if interrupted:
                raise
            interrupted = True
            session.tell("Ctrl-C again or Ctrl-D ends")


def take(session: Session, typed: Typed) -> None:
    """Answer a message or run a slash command. At a terminal, Ctrl-C ends only the answer."""
    messages = session.conversation.messages
    count = len(messages)
    try:
        (obey if typed.is_command else Session.send)(session, typed.text)
    except DeviceLostError:
        raise
    except StemEdgeError as error:
        session.fail(error)
    except KeyboardInterrupt:
        if not session.interactive:
            raise
        lost = not typed.is_command and len(messages) == count
        session.tell("stopped before an answer; the message is not kept" if lost else "stopped")

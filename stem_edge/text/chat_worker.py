"""The process that renders chat templates: requests on stdin, answers on stdout, as lines of JSON.

A template is a program from an untrusted author. Jinja's sandbox and this process's limits restrict it, and the
parent (stem_edge/text/chat_template.py) kills it when it takes too long.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import sys
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from stem_edge.system.child import limit_this_process

MAX_OUTPUT_CHARS = 1 << 20
MEMORY_NBYTES = 512 << 20
CPU_SECONDS = 20  # of a request; needed when the parent is gone and cannot end it
MAX_DATE_FORMAT = 64
OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class RefusedMessagesError(Exception):
    """Raised by a template that does not accept the messages."""


class Missing(jinja2.Undefined):
    """An undefined value. A template may test for it, but not use it.

    A missing field of a message or a tool prints as nothing, because published templates rely on that;
    printing an unset variable is an error.
    """

    __slots__ = ()

    def __str__(self) -> str:
        if self._undefined_obj is missing or self._undefined_exception is SecurityError:
            self._fail_with_undefined_error()
        return ""


class GenerationTag(Extension):
    """The Jinja tag `{% generation %}`, which marks a model's own words for training."""

    tags = {"generation"}  # noqa: RUF012  must be as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes inside the tag. The tag itself renders as nothing."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment with the functions and filters of chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Missing,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    for name in ("lipsum", "cycler", "joiner"):
        del made.globals[name]
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made


def _raise_exception(message: object) -> None:
    raise RefusedMessagesError(str(message))


def _strftime_now(format: object) -> str:
    return datetime.datetime.now().astimezone().strftime(str(format)[:MAX_DATE_FORMAT])


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Instead of Jinja's own filter, which escapes for HTML: models saw plain JSON in training.
    return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent)


@functools.lru_cache(1)
def compiled(source: str) -> jinja2.Template:
    """Compile a template. Raises TemplateSyntaxError, also if it refers to another template."""
    made = environment()
    for node in made.parse(source).find_all(OTHER_FILES):
        wrong = f"{type(node).__name__.lower()} of another template"
        raise jinja2.TemplateSyntaxError(wrong, node.lineno)
    return made.from_string(source)


def render(template: jinja2.Template, request: dict[str, Any]) -> dict[str, Any]:
    """Return {"text": the rendered text}, or {"error": reason} if it is too long."""
    pieces, length = list[str](), 0
    values = dict(request.get("arguments") or {}, documents=None, **request["tokens"])
    values |= {"messages": request["messages"], "tools": request.get("tools")}
    values |= {"add_generation_prompt": bool(request["add_generation_prompt"])}
    for piece in template.generate(values):
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            return {"error": f"it makes more than {MAX_OUTPUT_CHARS:,} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Render a request's template: {"text": ...}, or {"refused": reason} or {"error": reason}.

    request: the template, and values of its variables: messages, tools, special tokens, ...
    """
    try:
        return render(compiled(request["template"]), request)
    except RefusedMessagesError as error:
        return {"refused": str(error)[:500]}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"{error.message}"[:500], "line": error.lineno}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_NBYTES >> 20} MiB of memory"}
    except Exception as error:  # all, because an expression in a template can raise anything
        return {"error": f"{error}"[:500] or type(error).__name__, "line": _line(error)}


def _line(error: BaseException) -> int | None:
    """Return the template line at which an error was raised; None if it is unknown."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main() -> None:
    """Answer requests, one per line of JSON, until stdin is closed."""
    # Ctrl-C at a terminal reaches this process, too, but only the parent knows when it must end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    while line := sys.stdin.buffer.readline():
        limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

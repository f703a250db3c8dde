"""The process in which chat templates are rendered: requests on stdin, answers on stdout.

A template is a program of whoever made the bundle. Jinja's sandbox keeps it from everything but
its own values, this process' bounds from eating the machine, and the parent from waiting for ever:
see stem_edge/text/chat_template.py. A request and an answer are each a line of JSON.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stem_edge.system.child import limit_this_process

MAX_OUTPUT_CHARS = 1 << 20
MEMORY_NBYTES = 512 << 20
CPU_SECONDS = 20  # of a request; counts when the parent is gone
MAX_DATE_FORMAT = 64
READY = b"ready\n"
OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class RefusedMessagesError(Exception):
    """The template itself says that it does not take these messages."""


class OtherFileError(Exception):
    """The template wants to read another one."""


class Missing(jinja2.Undefined):
    """What is not there may be asked for, but neither shown nor used."""

    __slots__ = ()
    __str__ = jinja2.Undefined._fail_with_undefined_error


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the model's own words in training."""

    tags = {"generation"}  # noqa: RUF012  as its base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates of chat models expect it, and nothing more."""
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
    # Jinja's own escapes what HTML cannot hold; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent)


@functools.lru_cache(1)
def compiled(source: str) -> jinja2.Template:
    """A template that reads no other."""
    made = environment()
    for node in made.parse(source).find_all(OTHER_FILES):
        raise OtherFileError(f"{type(node).__name__.lower()} of another template", node.lineno)
    return made.from_string(source)


def render(template: jinja2.Template, request: dict[str, Any]) -> dict[str, Any]:
    """The text, or that it is too long."""
    pieces, length = list[str](), 0
    values = {"messages": request["messages"], "tools": None, "documents": None}
    flag = {"add_generation_prompt": bool(request["add_generation_prompt"])}
    for piece in template.generate(**values, **flag, **request["tokens"]):
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            return {"error": f"it makes more than {MAX_OUTPUT_CHARS:,} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request; whatever goes wrong is one, too."""
    try:
        return render(compiled(request["template"]), request)
    except RefusedMessagesError as error:
        return {"refused": str(error)[:500]}
    except OtherFileError as error:
        return {"error": str(error.args[0]), "line": error.args[1]}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"{error.message}"[:500], "line": error.lineno}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_NBYTES >> 20} MiB of memory"}
    except Exception as error:  # a template can do wrong whatever an expression can
        return {"error": f"{error}"[:500] or type(error).__name__, "line": _line(error)}


def _line(error: BaseException) -> int | None:
    """The template's line; Jinja gives its frames the lines of the source."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def serve(receive: Callable[[], bytes], send: Callable[[bytes], object]) -> None:
    """Answer until there are no more requests."""
    send(READY)
    while line := receive():
        limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
        send(json.dumps(answer(json.loads(line))).encode() + b"\n")


def main() -> None:
    """The process."""

    def send(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    serve(sys.stdin.buffer.readline, send)


if __name__ == "__main__":
    main()

"""Features of chat templates, run in this process. Their limits: faults/text/test_templates.py."""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import pytest

from stem_edge.text import chat_template
from stem_edge.text.chat_template import _end, _Worker
from stem_edge.text.chat_worker import answer

HELLO = [{"role": "user", "content": "Hello"}]


def ask(template: str, **changes: Any) -> dict[str, Any]:
    request = {"template": template, "messages": HELLO, "tokens": {}, "add_generation_prompt": 1}
    return answer(request | changes)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].role }}{{ messages | length }}", "user1"),
        ("{{ add_generation_prompt is true }}", "True"),
        ("{{ tools is none and documents is none }}", "True"), ("{{ bos_token }}", "<s>"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "01"),
        ("a{% generation %}{{ 'b' }}{% endgeneration %}c", "abc"),
        ("{{ {'a': '<\u00e9>'} | tojson }}", '{"a": "<\u00e9>"}'),
        ("{{ '\u00e9' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ lipsum is defined }}{{ cycler is defined }}{{ joiner is defined }}", "False" * 3),
        ("{{ nobody is defined }}{{ nobody.name if nobody else 'no' }}", "Falseno"),
        ("{% for m in messages %}{{ m.tool_calls or m.name | default('N') }}{% endfor %}", "N"),
        ("{% for n in nobody %}{% endfor %}", ""),
        ("{{ messages[0].name }}{{ messages[0]['name'] | upper }}{{ messages[9] }}", ""),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().astimezone().year)),
        ("{{ strftime_now('x' * 65) | length }}", "64"), ("{{ 'a' * 1048576 }}", "a" * 2**20),
    ],
)  # fmt: skip
def test_what_a_template_can_use(template: str, text: str) -> None:
    assert ask(template, tokens={"bos_token": "<s>"}) == {"text": text}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no') }}", {"refused": "no"}),
        ("{{ raise_exception('n' * 501) }}", {"refused": "n" * 500}),
        ("\n{% include 'x' %}", {"error": "include of another template", "line": 2}),
        ("{% import 'x' as y %}", {"error": "import of another template", "line": 1}),
        ("{% from 'x' import y %}", {"error": "fromimport of another template", "line": 1}),
        ("{% extends 'x' %}", {"error": "extends of another template", "line": 1}),
        ("\n\n{{ 1 / 0 }}", {"error": "division by zero", "line": 3}),
        ("\n{{ nobody }}", {"error": "'nobody' is undefined", "line": 2}),
        ("{{ ''.__class__ }}", 1),
        ("{{ nobody.name }}", 1),
        ("\n{{ 'a' + nobody }}", 2),
        ("{{ messages[0].name.first }}", 1),
        ("\n\n{% odd %}", 3),
        ("{% endif %}", 1),
        ("{{ " + "(" * 20_000 + " }}", {"error": "it is nested too deeply"}),
        ("{{ " + "-" * 20_000 + "1 }}", {"error": "it is nested too deeply"}),
        ("{% if x %}" * 3000 + "{% endif %}" * 3000, {"error": "it is nested too deeply"}),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"error": "it is nested too deeply"}),
        ("{{ 'a' * 1048577 }}", {"error": "it makes more than 1,048,576 characters"}),
        (
            "{% for _ in range(2000) %}{{ 'a' * 1000 }}{% endfor %}",
            {"error": "it makes more than 1,048,576 characters"},
        ),
        ("{% macro f(n) %}{{ n.a.b }}{% endmacro %}\n{{ f({}) }}", 1),
        ("\n{% if %}", 2),
        ("{% generation %}", 1),
        ("{{ messages.append(1) }}", 1),
    ],
)
def test_what_is_wrong_has_its_line(template: str, found: object) -> None:
    told = ask(template)
    if isinstance(found, dict):
        assert told == found
    else:
        assert (told["line"], "error" in told) == (found, True)


def line(template: str) -> bytes:
    request = {"template": template, "messages": HELLO, "tokens": {}, "add_generation_prompt": True}
    return json.dumps(request).encode() + b"\n"


def test_a_process_belongs_to_who_started_it() -> None:
    worker = _Worker()
    detached = worker.close.detach()
    assert detached is not None
    _, function, arguments, _ = detached
    assert function is _end
    owner, process = arguments
    assert owner == os.getpid()
    _end(owner + 1, process)  # as a fork of its owner
    assert json.loads(worker.ask(line("a"), 60.0)) == {"text": "a"}
    _end(*arguments)
    assert process.returncode is not None
    assert process.stdin.closed and process.stdout.closed
    with pytest.raises((OSError, ValueError)):
        worker.ask(line("a"), 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [("import time; time.sleep(600)", 1.0, TimeoutError), ("", 60.0, BrokenPipeError)],
)
def test_a_process_that_does_not_get_ready(
    code: str, seconds: float, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "START_SECONDS", seconds)
    monkeypatch.setattr(chat_template, "module_command", lambda name: [sys.executable, "-c", code])
    with pytest.raises(error):
        _Worker()

"""Hostile chat templates: they may compute for a while, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from contract import refused

from stem_edge.errors import BundleError, InputError
from stem_edge.text.chat_template import SECONDS, ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]
TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOPS = "{% for _ in range(99999) %}" * 3 + "{% set y = 1 %}" + "{% endfor %}" * 3


def write(folder: Path, template: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    return path


def fails(folder: Path, template: str, *naming: str, seconds: float = 2 * SECONDS) -> None:
    """Check that the template is refused when it is read."""
    path = write(folder, template)
    refused(lambda: ChatTemplate(path, seconds), BundleError, path, "chat_template", *naming)
    assert not children()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "chat_worker" in " ".join(p.cmdline())]


def test_t10_a_template_renders_in_a_process_that_stays_and_ends(tmp_path: Path) -> None:
    with closing(ChatTemplate(write(tmp_path, TURNS))) as template:
        text = "<s><|im_start|>user\nHello<|im_end|>\n"
        assert template.render(HELLO, False) == text
        assert template.render(HELLO) == f"{text}<|im_start|>assistant\n"
        (first,) = children()
        assert template.render(HELLO, False) == text
        assert [p.pid for p in children()] == [first.pid]
    assert not children()
    with closing(ChatTemplate(write(tmp_path, TURNS))) as template:
        template.close()
        assert template.render(HELLO, False) == text  # a closed one can start again


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}", "{{ raise_exception.__globals__ }}",
        "{{ (strftime_now | attr('__globals__')).sys }}", "{{ namespace.__init__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}", "{{ '%s'.__class__ }}",
        "{{ messages.append(1) }}", "{% set _ = messages[0].update({'role': 'system'}) %}",
        "{{ messages | map(attribute='__class__') | list }}", "{{ lipsum() }}",
        "{{ self._TemplateReference__context.environment }}", "{{ open('/etc/passwd') }}",
    ],
)  # fmt: skip
def test_t10_nothing_is_reached_from_within(tmp_path: Path, template: str) -> None:
    path = write(tmp_path, template)
    try:
        with closing(ChatTemplate(path)) as made:
            text = made.render(HELLO)
    except BundleError as error:
        assert "line 1" in str(error)
    else:
        assert "class" not in text
        assert "<" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [LOOPS, "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}" + LOOPS]
)
def test_t11_loops_in_loops_end_at_a_deadline(tmp_path: Path, template: str) -> None:
    fails(tmp_path, template, "longer than 2.0 seconds", seconds=0.5)


@pytest.mark.slow
def test_t11_after_a_deadline_the_template_works_for_others(tmp_path: Path) -> None:
    source = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}done"
    with closing(ChatTemplate(write(tmp_path, source), 1.0)) as template:
        slow = [{"role": "user", "content": "slow"}]
        refused(lambda: template.render(slow), InputError, "longer than 1.0 seconds")
        assert template.render(HELLO) == "done"


def test_t11_a_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with closing(ChatTemplate(write(tmp_path, TURNS))) as template:
        children()[0].kill()
        refused(lambda: template.render(HELLO), BundleError, "its process ended")
        assert template.render(HELLO).startswith("<s>")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows stops no process")
def test_t11_a_process_that_does_not_read_is_ended(tmp_path: Path) -> None:
    """A long message fills the pipe, so that writing to it could block for ever."""
    with closing(ChatTemplate(write(tmp_path, TURNS), 1.0)) as template:
        children()[0].send_signal(signal.SIGSTOP)
        long = [{"role": "user", "content": "x" * 400_000}]
        refused(lambda: template.render(long), InputError)
        assert template.render(HELLO).startswith("<s>")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        pytest.param(
            "{{ 'a' * 10**10 }}", "memory" if os.name == "posix" else "", marks=pytest.mark.slow
        ),
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}",
            "",
            marks=pytest.mark.slow,
        ),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "nested too deeply"),
        ("one\ntwo\n{% odd %}", "line 3"),
        ("one\n{{ nobody }}", "line 2: the chat template fails: "),
    ],
    ids=range(5),
)
def test_t12_t13_t14_what_is_too_much_too_deep_or_wrong(
    tmp_path: Path, template: str, named: str
) -> None:
    """What is wrong is refused with its line; more of it is in test_chat_worker.py."""
    fails(tmp_path, template, named, seconds=4.0)


def test_t15_text_of_messages_is_not_a_template(tmp_path: Path) -> None:
    text = "{{ 7 * 7 }}{% for %}"
    with closing(ChatTemplate(write(tmp_path, "{{ messages[0].content }}"))) as template:
        assert template.render([{"role": "user", "content": text}]) == text

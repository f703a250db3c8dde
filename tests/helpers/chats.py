"""The demo model with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forging import sealed
from installed import DEMO

from stem_edge.text import thoughts
from stem_edge.text.thoughts import Thoughts

# Each text ends with a special token.
MARKED = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|fim_prefix|>{% endfor %}"
# Sentences that follow each other, as the demo was trained; two questions in a row are refused.
SENTENCES = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('answer first') }}{% endif %}"
    "{{ m.content }}{% if m.role == 'assistant' %} {% endif %}{% endfor %}"
)


def write_chat_bundle(folder: Path, template: str = SENTENCES) -> Path:
    """Write a copy of the demo that has this template."""
    told = {"bos_token": "<|begin_of_text|>", "chat_template": template}
    return sealed(DEMO, folder / "bundle", {"tokenizer_config.json": json.dumps(told).encode()})


@contextmanager
def thinking(folder: Path) -> Iterator[Path]:
    """Write a chat bundle, and let all before "country" in its answers about capitals be thoughts."""
    marks = Thoughts("is", "country")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thoughts, "KNOWN", (marks,))
        yield write_chat_bundle(folder, SENTENCES + "{# country #}")

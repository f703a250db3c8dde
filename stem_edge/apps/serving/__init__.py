"""A server for programs and people: OpenAI's chat and completions, and a chat page.

Two threads render and tokenize prompts; one thread computes all answers from token ids.
"""

from __future__ import annotations

from stem_edge.apps.serving.program import app

__all__ = ["app"]

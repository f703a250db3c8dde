"""A server for programs and people: OpenAI's and Anthropic's interfaces, and a chat page.

| file | has |
|---|---|
| program.py | `app`: all of it as an ASGI program |
| service.py | what the routes share: the model, its name, the limits, and how answers begin |
| compute.py, jobs.py | the one thread that computes the answers of all clients, and scores of texts |
| budget.py | the memory that requests may take |
| reply.py | the answer to one prompt, as it reaches the event loop |
| params.py | how tokens are chosen, with errors that name a field |
| turn.py, answers.py | a conversation and its answers in no interface's form: text, calls of tools, the end |
| openai/, anthropic/ | the same in each interface's form |
| text_routes.py, state_routes.py | tokens and templates; health, metrics, properties |
| metrics.py, timings.py | figures of all answers, and of one |
| streams.py | events of a stream, and clients that leave |
| access.py | who may ask, from where, and how much |
| refusals.py | what is refused, and errors in each interface's form |
| bodies.py, http.py | JSON of requests and responses, and errors as responses |
| connections/ | what one connection may take, and how long |
| page/, pages.py | the chat page: files for the browser, and their routes |

Requests are read, rendered and tokenized in the threads of HTTP; the compute thread gets token ids.
Nothing here is needed to load or to run a model from Python. What reads bodies and makes answers needs
no HTTP, because batches of requests in files have the same form (stem_edge.batches); so `app` is imported
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stem_edge.serving.program import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("stem_edge.serving.program"), name)
    raise AttributeError(f"module 'stem_edge.serving' has no attribute {name!r}")

"""A server for programs and people: OpenAI's chat and completions, and a chat page.

| file | contents |
|---|---|
| program.py | `app`: the server as an ASGI program |
| service.py | state that all routes share: model, name, settings, and threads for work on requests |
| compute.py | the one thread that computes the answers of all clients, and scores of texts |
| reply.py | passes answers from the compute thread to the event loop |
| routes/ | HTTP paths: OpenAI's interfaces, state of the server, and the chat page |
| http.py | request bodies, responses, event streams, and clients that disconnect |
| access.py | API key, host names, origins, and sizes of requests |
| connections.py | limits on the number of connections, and on how long they may idle |
| page/ | the chat page: files for the browser |

Two threads render and tokenize prompts; the compute thread gets token ids. Nothing here is needed to load
or to run a model from Python. Formats of requests and answers are in stem_edge.apps.answers.
"""

from __future__ import annotations

from stem_edge.apps.serving.program import app

__all__ = ["app"]

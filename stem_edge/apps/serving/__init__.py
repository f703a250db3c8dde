"""A server for programs and people: OpenAI's chat and completions, and a chat page.

| file | has |
|---|---|
| program.py | `app`: all of it as an ASGI program |
| service.py | what the routes share: the model, its name, the limits, and threads for work on requests |
| compute.py | the one thread that computes the answers of all clients, and scores of texts |
| reply.py | the answers to a request, as they reach the event loop |
| routes/ | the paths: OpenAI's, the state, and the chat page |
| http.py | bodies, responses, streams of events, and clients that leave |
| access.py | API key, host names, origins, and sizes of requests |
| connections.py | limits on the number of connections, and on how long they may idle |
| page/ | the chat page: files for the browser |

HTTP threads read, render and tokenize requests; the compute thread gets token ids. Nothing here is needed
to load or to run a model from Python. The forms of request bodies and answers are in
stem_edge.apps.answers, which batches of files share.
"""

from __future__ import annotations

from stem_edge.apps.serving.program import app

__all__ = ["app"]

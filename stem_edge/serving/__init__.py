"""A server for programs and people: OpenAI's and Anthropic's interfaces, and a chat page.

| file | has |
|---|---|
| app.py | `app`: all of it as an ASGI program |
| service.py | what the routes share: the model, its name, the limits |
| compute.py | the one thread that computes the answers of all clients |
| reply.py | the answer to one prompt, as it reaches the event loop |
| turn.py | a conversation and its answer in no interface's form: text, calls of tools, the end |
| openai/, anthropic/ | the same in each interface's form |
| text_routes.py, state_routes.py | tokens and templates; health, metrics, properties |
| streams.py | events of a stream, and clients that leave |
| access.py, refusals.py | who may ask; what is refused, in each interface's form |
| page/ | the chat page: files for the browser |

Requests are read, rendered and tokenized in the threads of HTTP; the compute thread gets token ids.
Nothing here is needed to load or to run a model from Python.
"""

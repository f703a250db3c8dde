"""Requests and answers in OpenAI's format, for the HTTP server and for batches of prompts.

| file | contents |
|---|---|
| turn.py | turns a conversation into requests to the model: tokens, sampling, tools |
| events.py | events of an answer while it is generated: reasoning, text, tool calls, the end |
| openai/ | JSON of requests and responses: completions and chat completions |
| refusals.py | errors with an HTTP status, and their JSON bodies |
| token_texts.py | text and log probabilities of single tokens |

Nothing here uses an HTTP library or an event loop.
"""

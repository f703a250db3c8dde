"""Requests and answers in OpenAI's form, for the server and for batches of files.

| file | has |
|---|---|
| turn.py | requests to answer a conversation: tokens, sampling, tools |
| events.py | answers as they are generated: thoughts, text, tool calls, the end |
| openai/ | request bodies and answers of completions and chat completions |
| refusals.py | HTTP errors, and error bodies |
| token_texts.py | texts of single tokens |

No HTTP, and no event loop.
"""

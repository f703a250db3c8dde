"""Requests and answers in OpenAI's form, for a server or a batch of a file.

| file | has |
|---|---|
| turn.py | a conversation to answer, and how tokens are chosen |
| events.py | answers as they are generated: thoughts, text, tool calls, the end |
| openai/ | request bodies and answers of completions and chat completions |
| refusals.py | HTTP errors, and error bodies |
| token_texts.py | texts of single tokens |

No HTTP, and no event loop.
"""

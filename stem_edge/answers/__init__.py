"""Requests and answers of the interfaces, for a server or a batch of a file.

| file | has |
|---|---|
| turn.py | a conversation in no interface's form, and how tokens are chosen |
| events.py | answers in no interface's form: thoughts, text, calls of tools, the end |
| growing.py | answers as streams with events for each part: what both interfaces share |
| openai/, anthropic/, ollama.py | requests and answers in each interface's form |
| refusals.py | what is refused, and errors in each interface's form |
| token_texts.py | texts of single tokens |

No HTTP, and no event loop.
"""

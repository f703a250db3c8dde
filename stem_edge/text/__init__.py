"""Tokenizers and chat templates of strangers: what of them is let through, and where it runs.

Tokens of a text are runtime/text's.
"""

"""Guessing the next tokens, so that one step computes several; no guess changes a token.

A guess is a token that may come next; a draft is a guess that a step computes, to verify it.
"""

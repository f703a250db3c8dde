"""Speculative decoding: guesses the next tokens, so that one step computes several.

A guess is a token that may come next. A draft is a guess that a step verifies. Guesses never change tokens.
"""

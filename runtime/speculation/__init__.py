"""Speculative decoding: drafts the next tokens, so that one step computes several tokens.

A draft is a token that may come next. A step verifies its drafts, so drafts never change the answer.
"""

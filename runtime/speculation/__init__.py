"""Speculative decoding: drafts the next tokens, so that one step computes several tokens."""

"""Checks of tokenizers and chat templates, which come from strangers, and where templates run.

Encoding and decoding text is in runtime/text.
"""

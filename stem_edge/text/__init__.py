"""Checks of untrusted tokenizers and chat templates, and the process that renders templates.

Encoding and decoding text is in runtime/text.
"""

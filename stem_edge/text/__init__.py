"""Checks of tokenizers and chat templates, which strangers wrote, and the process for templates.

Encoding and decoding text is in runtime/text.
"""

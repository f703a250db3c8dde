"""Bindings of the ggml library, and the layout of backbone.gguf, the file that ggml runs."""

"""ggml library: ctypes bindings, a test before first use, and the layout of backbone.gguf.

The engine that runs models on ggml is in runtime/backends/ggml.
"""

"""The prefix cache: KV caches of earlier prompts, which later calls continue from.

A call reuses a KV cache only if that changes no bits of its results: see reuse.py.
The engine computes the KV caches, and its backends own the arrays.
"""

"""The prefix cache: KV caches of earlier prompts, which later calls continue from.

A call uses them only where it then computes the same bits as without them: see reuse.py.
The engine computes them, and its backends own their arrays.
"""

"""Keys and values of earlier prompts; later calls go on from them.

They are reused only where a call that computes everything gives the same bits: reuse.py says where.
The engine computes them, and its backends own their arrays.
"""

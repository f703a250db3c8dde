"""Keys and values of earlier prompts, from which later calls go on.

They are reused only where a call that computes everything gives the same bits: prefix.py says where.
Computing them belongs to the engine, and their arrays to its backends.
"""

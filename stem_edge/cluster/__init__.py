"""Batches, exports and evaluations on several machines, by Ray, which is imported here alone.

Other rooms say what the pieces of their work are; this one has them done elsewhere.
"""

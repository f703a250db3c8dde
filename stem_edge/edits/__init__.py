"""Edit files: what they say, where they lie, the paper's schemes.

What makes and compares edits is in editing; what looks them up, in runtime/rows.
"""

"""Edit files: what they say, where they lie, the paper's schemes.

What makes and compares edits is in editing; what applies them to a prompt, in runtime/lookups.
"""

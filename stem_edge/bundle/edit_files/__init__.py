"""Edit files: their format, where they are looked for, and the alignment schemes of the STEM paper.

Making and comparing edits is in editing, applying them to a prompt in runtime/lookups.
"""

"""File system access: checked reads of regular files, atomic writes, locks, hashes.

The meaning of the files is known in other packages.
"""

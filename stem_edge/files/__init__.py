"""File system access: checked reads of regular files, atomic writes, locks, hashes.

Other packages know what the files contain.
"""

"""File system access: checked reads of regular files, atomic writes, locks, hashes."""

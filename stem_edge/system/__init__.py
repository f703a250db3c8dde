"""Operating system: memory, page cache, processor and child processes."""

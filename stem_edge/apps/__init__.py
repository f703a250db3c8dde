"""Applications on top of export and runtime: serving, batches, editing, measuring."""

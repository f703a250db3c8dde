"""Batches: run every prompt of a file, and append each result to another file; resumable."""

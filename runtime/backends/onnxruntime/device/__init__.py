"""Graphs on an execution provider: their loaders, slots, contexts and batches."""

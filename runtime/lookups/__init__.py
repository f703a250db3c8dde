"""Decides which rows tokens look up: their own, rows of edits, or rows that a caller chooses."""

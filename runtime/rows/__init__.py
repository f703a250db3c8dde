"""Reads table rows from flash as token ids arrive, and caches them in slots for the backbone."""

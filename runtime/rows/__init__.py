"""The path of a row: prefetched as token ids arrive, cached in slots, read from flash."""

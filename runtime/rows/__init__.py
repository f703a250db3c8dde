"""The path of a row: read from flash as token ids arrive, and cached in slots for the backbone."""

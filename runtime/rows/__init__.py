"""Reading of table rows: from flash as token ids arrive, cached in slots for the backbone."""

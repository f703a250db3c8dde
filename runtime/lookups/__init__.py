"""What tokens look up: edits in effect, where words stand in a prompt, row ids."""

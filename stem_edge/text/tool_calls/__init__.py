"""Calls of tools in the text of an answer, as each family of chat templates writes them."""

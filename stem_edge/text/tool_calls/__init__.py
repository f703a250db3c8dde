"""Tool calls in the text of an answer, in the format of each family of chat templates."""

"""HTTP routes of the server: chat, completions, the chat page, and state."""

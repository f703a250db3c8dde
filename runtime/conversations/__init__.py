"""Conversations: turns of messages, and files of them beside their keys and values."""

"""Conversations with a model, and files that store their messages."""

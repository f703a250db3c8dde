"""Requests and answers in OpenAI's format, for the HTTP server and for batches of prompts.

Nothing here uses an HTTP library or an event loop.
"""

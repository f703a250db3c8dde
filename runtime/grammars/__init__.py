"""Structured output: which tokens a JSON Schema, a regular expression or a grammar allows next."""

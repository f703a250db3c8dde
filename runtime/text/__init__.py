"""Tokenizing, detokenizing and chat prompts."""

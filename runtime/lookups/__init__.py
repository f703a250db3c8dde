"""Chooses which rows tokens look up, from edits in effect, words in a prompt, and callers' ids.

The rows package reads the records from which edits compose rows.
"""

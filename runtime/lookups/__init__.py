"""Choosing what tokens look up: edits in effect, places of words in a prompt, ids given by callers.

Reading the records that edits compose belongs to rows.
"""

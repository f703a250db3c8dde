"""Calls of tools in the text of an answer, as each family of chat templates writes them.

stem_edge/apps/answers/turn.py shows how they are offered, demanded by a grammar, and read.
"""

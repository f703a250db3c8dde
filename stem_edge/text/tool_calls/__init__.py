"""Tool calls in the text of an answer, in the format of each family of chat templates.

stem_edge/apps/answers/turn.py shows how tools are offered, forced by a grammar, and parsed.
"""

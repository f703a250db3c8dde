"""Guessing the next tokens, so that one step computes several; no guess changes a token.

Which tokens to guess (`ngrams`, `draft_model`) and how many (`gate`). What is done with them is in
generation.py, and what steps cost is measured in backends/step_costs.py.
"""

"""Guessing the next tokens, so that one step computes several; no guess changes a token.

A guess is a token that may come next; a draft is a guess that a step computes, to verify it.

| file | has |
|---|---|
| text_drafts.py | guesses from the text so far, and the index that finds them |
| model_drafts.py, draft_bundle.py | guesses of a smaller model, and how its bundle is loaded |
| opening.py | what a model that is being loaded speculates with |
| gate.py | how many guesses a step verifies |
| speculation.py | what a model speculates with, and the guesses of one answer |

What is done with guesses is in decoding.py; costs of steps are in backends/interface.py.
"""

"""The generation loop: a Loop computes one request alone, a Scheduler computes several together.

A step processes a chunk of one prompt, or one token of each running sequence. These two kinds of steps alternate.
"""

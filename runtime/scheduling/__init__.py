"""The generation loop: a Loop computes one request alone, a Scheduler computes several together.

A step is a chunk of the prompt at the front of the queue, or a token of each running sequence; they alternate.
"""

"""The generation loop: a Loop computes one request alone, a Scheduler computes several together.

`Model.generate` runs a Loop. `generate_many`, batches and the server run a Scheduler, which is a Loop for several.
A step is a chunk of the prompt at the front of the queue, or a token of each running sequence; they alternate.

| file | contains |
|---|---|
| loop.py | the loop of one answer |
| request.py | a prompt and its answer: its state from the first chunk of the prompt to the last token |
| scheduler.py | a Loop for several requests: which request computes next, memory, failures |
| many.py | many prompts through a scheduler, submitted as places become free; Ctrl-C between steps |
"""

"""The one loop: every answer is a request that a scheduler steps, one alone or several together.

`Model.generate` steps a scheduler with one place; `generate_many`, batches and the server have several. A
step is one unit of work: a chunk of the prompt at the front of the queue, or a token of each running
sequence; they alternate if there are both. So no request waits longer than one chunk, and the rows of the
next unit are known and read while this one computes.

| file | has |
|---|---|
| request.py | a prompt and its answer: its state from the first chunk of the prompt to the last token |
| scheduler.py | which sequence computes next, memory, failures |
| batch.py | steps of several sequences, under the lock of the engine |
| queue.py | requests that have not begun, and other work that alternates with them |
| many.py | many prompts through a scheduler, submitted as places become free; Ctrl-C between steps |

A sequence decodes in the context of its prompt. Alone, it drafts; when another one begins, its context joins
the batch until the sequence ends. runtime/prefixes counts the memory of keys and values for all callers.
"""

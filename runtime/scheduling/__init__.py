"""The one loop: every answer is a request, computed alone by a Loop, or with others by a Scheduler.

`Model.generate` runs a Loop; `generate_many`, batches and the server step a Scheduler, which is a Loop for several. A
step is one unit of work: a chunk of the prompt at the front of the queue, or a token of each running
sequence; they alternate if there are both. So no request waits longer than one chunk, and the rows of the
next unit are known and read while this one computes.

| file | has |
|---|---|
| loop.py | the loop of one answer, as `Model.generate` runs it |
| request.py | a prompt and its answer: its state from the first chunk of the prompt to the last token |
| scheduler.py | a Loop for several requests: which computes next, memory, failures |
| batch.py | steps of several sequences, under the lock of the engine |
| queue.py | requests that have not begun, and other work that alternates with them |
| many.py | many prompts through a scheduler, submitted as places become free; Ctrl-C between steps |

A sequence decodes in the context of its prompt. Alone, it drafts; when another one begins, its context joins
the batch until the sequence ends. runtime/prefixes counts the memory of keys and values for all callers.
"""

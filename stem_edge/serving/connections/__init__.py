"""Connections of clients, on top of uvicorn: what one may take, and how long.

| file | has |
|---|---|
| config.py | how uvicorn is run, and how many connections the system allows |
| connection.py | one connection: what is refused in HTTP, and the requests that are answered |
| turns.py | whose turn it is there, the time for it, and its end |
| lingering.py | the end of a connection whose client still sends |
| quiet_log.py | a log that does not grow with the number of equal errors |
"""

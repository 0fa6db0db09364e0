"""Move KV pages from one worker to another, fenced and verified.

Decides which processes attach to each other (`roster.py`, `dialling.py`), and in which order copies are posted
(`copies.py`). Begin at `session.py`, the messages of a hand-off; `mover.py` is the thread that writes. Must not know
what the pages mean: the doors of workers decide when they are free.
"""

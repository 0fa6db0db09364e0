"""Turn granted KV pages into tokens, in one continuous batch.

Decides which hand-offs may arrive, and when the pages that they were granted are free or a sequence's. Begin at
`incoming.py`; `receiver.py` is the state machine of one hand-off, `granting.py` sets pages aside. Must not know of
routers, of streams, or how bytes move.
"""

"""Turn prompts into KV pages and a first token, and hand them to decode workers.

Decides when the pages of a hand-off are sent, and when they may be released. Begin at `outgoing.py`; `sender.py` is the
state machine of one hand-off, `starting.py` says which prompts may start. Must not know of routers, of streams, or how
bytes move.
"""

"""Values that processes exchange, and their conversion from and to protos, a module for each proto.

Decides what is well-formed. Begin at `refusal.py` (every way in which a request ends without its answer), `kvlayout.py`
and `paging.py` (what both ends of a hand-off agree on). Must not hold state.
"""

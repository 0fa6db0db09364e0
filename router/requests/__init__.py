"""The life of each request, from arrival to its one end. Pure.

Begin at `core.py`; `delivery.py` takes tokens in, `retry.py` what a lost worker leaves. Must not choose workers:
`placement` does.
"""

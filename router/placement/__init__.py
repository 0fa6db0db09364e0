"""Which worker computes a request, and whether its objectives will be met. Pure.

Begin at `goodput.py`; `predict.py` says how long it will take, `view.py` what is known of a worker. Must not send
anything: it returns decisions.
"""

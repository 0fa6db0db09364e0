"""The device side of a worker: what computes its steps, and the memory that its KV lies in.

Decides how a worker starts on its device: dtype, form of the weights, number of pages. Begin at `executor.py`, the
contract; `local.py` is one rank in this process, `loading.py` builds it. Must not know of requests or of other workers.
"""

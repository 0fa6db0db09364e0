"""Models: for each family a file that reads its config as a `Design`, and a decoder that computes any design.

Decides which checkpoints are understood, and refuses by name what is not. Begin at `design.py` and `families`; `ops.py`
is what devices offer, `weights.py` where tensors come from. Must not know of pages, batches or requests.
"""

"""GPU kernels in Triton, CPU kernels in C (`cpu`), and the random numbers that all samplers share.

Decides nothing: tensors go in and come out. Begin at `attention.py`. Must not know of sequences, pools or requests.
"""

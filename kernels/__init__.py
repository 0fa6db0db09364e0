"""GPU kernels in Triton, CPU kernels in C (`cpu`), and the random numbers that all samplers share."""

"""GPU kernels in Triton, their meaning in plain torch, and the random numbers both samplers share."""

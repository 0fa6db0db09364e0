"""Run the engine's kernels on the CPU, through Triton's interpreter, which must be chosen before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

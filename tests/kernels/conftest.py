"""Run the kernels on the CPU, through Triton's interpreter, which must be chosen before they are imported."""

import os
import sys

assert "pdserve.kernels.device.attention" not in sys.modules, "kernels were imported before the interpreter was chosen"
os.environ["TRITON_INTERPRET"] = "1"

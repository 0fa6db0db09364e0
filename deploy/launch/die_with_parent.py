"""Become another program that dies with its parent. Arguments: PARENT_PID PROGRAM ARGUMENT...

The kernel sends SIGKILL when the parent ends, however it ends; elsewhere than on Linux nothing happens. The setting
outlives exec, so a child needs no code of its own for it.
"""

import os
import sys

from pdserve.signals import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])

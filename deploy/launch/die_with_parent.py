"""Become another program that dies with its parent. Arguments: PARENT_PID PROGRAM ARGUMENT...

The kernel sends SIGKILL when the parent ends, however it ends (prctl PR_SET_PDEATHSIG, on Linux; elsewhere
nothing happens). The setting outlives exec, so a child needs no code of its own for it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when `parent_pid` ends; exit at once if it already has."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])

"""Starts the process of a rank that is not the first."""

import os
import socket
import subprocess
import sys

from pdserve.executor.threads import given_environment


def start_rank(*descriptors: int | None) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a rank's process, which inherits the descriptors; return it and the socket that it serves.

    It ends with the thread that calls this.
    """
    own, theirs = socket.socketpair()
    with theirs:
        arguments = (str(theirs.fileno()), str(os.getpid()))
        command = (sys.executable, "-P", "-m", "pdserve.executor.rank", *arguments)
        inherited = [each for each in (theirs.fileno(), *descriptors) if each is not None]
        process = subprocess.Popen(command, env=given_environment(), pass_fds=inherited, stdin=subprocess.DEVNULL)
    return process, own

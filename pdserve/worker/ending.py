"""Ends a worker's process at once, so that it writes into no other worker's pages any more.

Nothing is cleaned up: a thread that hangs cannot be ended, copies cannot be recalled, and only the end of the process
stops them.
"""

import logging
import os

logger = logging.getLogger(__name__)

HUNG_EXIT_STATUS = 70  # EX_SOFTWARE: a thread hangs
DEVICE_EXIT_STATUS = 71  # EX_OSERR: the device computes nothing any more
DISMISSED_EXIT_STATUS = 77  # EX_NOPERM: this process is known to have ended, or has a successor


def end_process(status: int, why: str) -> None:
    logger.critical("%s: this process ends", why)
    os._exit(status)

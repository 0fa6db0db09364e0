"""Run the `pdserve` command: python -m pdserve."""

import signal
import sys

from pdserve.base.processes import exit_status
from pdserve.base.signals import end_on_signals


def main() -> None:
    """Run the command that the arguments name; from its first line on, SIGTERM and SIGINT end it."""
    end_on_signals((signal.SIGTERM,))  # Python itself handles SIGINT
    try:
        from pdserve.cli.app import main as run  # noqa: PLC0415 - takes a while to import

        run()
    except KeyboardInterrupt:
        sys.exit(exit_status(signal.SIGINT))


if __name__ == "__main__":
    main()

"""Run the `pdserve` command: python -m pdserve."""

import signal
import sys

from pdserve import signals


def main() -> None:
    """Run the command that the arguments name; from its first line on, SIGTERM and SIGINT end it."""
    signals.end_on_signals((signal.SIGTERM,))  # Python itself handles SIGINT
    try:
        from pdserve.cli.app import main as run  # noqa: PLC0415 - takes a while to import

        run()
    except KeyboardInterrupt:
        sys.exit(signals.exit_status(signal.SIGINT))


if __name__ == "__main__":
    main()

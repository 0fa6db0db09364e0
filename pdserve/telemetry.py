"""Logging of pdserve's processes: one line a record on stderr, with the process's name in it."""

import logging
import sys


class OneLineFormatter(logging.Formatter):
    """Keeps a record on one line, tracebacks included: no request's content can forge a second record."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def configure_logging(process: str, level: str = "info") -> None:
    """Send this process's log to stderr, replacing what was configured; each line names `process`."""
    handler = logging.StreamHandler(sys.stderr)
    escaped = process.replace("%", "%%")
    handler.setFormatter(OneLineFormatter(f"%(asctime)s %(levelname)-7s {escaped} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

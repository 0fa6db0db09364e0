"""Logging of pdserve's processes: one record a line on stderr, as text or as JSON, with the name of the process."""

import json
import logging
import sys
from datetime import UTC, datetime

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}  # every record has these


class OneLineFormatter(logging.Formatter):
    """Writes a record on one line, with its traceback: the content of a request cannot forge a second record."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, process, logger, message, and the record's extra fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: given for key, given in vars(record).items() if key not in _OWN}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logging(process: str, level: str = "info", log_format: str = "text") -> None:
    """Send this process's log to stderr, replacing what was configured; each record names `process`."""
    handler = logging.StreamHandler(sys.stderr)
    escaped = process.replace("%", "%%")
    text = OneLineFormatter(f"%(asctime)s %(levelname)-7s {escaped} %(name)s: %(message)s")
    handler.setFormatter(text if log_format == "text" else JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

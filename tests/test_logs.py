"""How processes write their logs."""

import json
import logging
import sys

import pytest

from pdserve.observe.logs import JsonFormatter, OneLineFormatter


def record(
    message: str, *args: object, extra: dict[str, object] | None = None, fails: bool = False
) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "pdserve.x", "levelno": 30, "levelname": "WARNING", "msg": message, "args": args}
    )
    if fails:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            made.exc_info = sys.exc_info()
    vars(made).update(extra or {})
    return made


def test_a_record_is_an_object_of_its_own_line() -> None:
    line = JsonFormatter("router").format(record("lost %r\n", "a\nb", fails=True))
    assert "\n" not in line
    written = json.loads(line)
    assert written["message"] == "lost 'a\\nb'\n"
    assert (written["level"], written["process"], written["logger"]) == ("warning", "router", "pdserve.x")
    assert "ValueError: two\nlines" in written["exception"]


def test_the_extra_fields_of_a_record_are_in_its_object() -> None:
    written = json.loads(JsonFormatter("router").format(record("ended", extra={"request_id": "01", "ttft_ms": 3.5})))
    assert (written["request_id"], written["ttft_ms"]) == ("01", 3.5)


@pytest.mark.parametrize("formatter", [JsonFormatter("p"), OneLineFormatter("%(message)s")])
def test_content_forges_no_second_record(formatter: logging.Formatter) -> None:
    assert "\n" not in formatter.format(record("%s", 'x\r\n{"level": "error"}', fails=True))

"""Writes what the chart's rules of policies go by: limits of durations that are given as texts, and time zones."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from pdserve.autoscaler.schema import Policy

FILE = Path(__file__).parents[1] / "pdserve" / "files" / "policy.json"
_YEAR = datetime(2026, 1, 1, tzinfo=UTC)  # whose weeks stand for all, as in pdserve/autoscaler/pools.py
_DAYS = 380
_LIMITS = {
    "minimum": "greater than or equal to",
    "exclusiveMinimum": "greater than",
    "maximum": "less than or equal to",
}


def policy_rules() -> str:
    """Return the file, with a line for each duration and each set of time zones that keep one time."""
    schema = Policy.model_json_schema()
    durations = [
        {
            "key": key,
            "limits": [{"is": words, "bound": number[name]} for name, words in _LIMITS.items() if name in number],
        }
        for key, number in _durations(schema, schema["$defs"])
        if not key.startswith("actuator.")
    ]
    alike: dict[str, list[str]] = {}
    for name in sorted(available_timezones()):
        alike.setdefault(json.dumps(_offsets(ZoneInfo(name))), []).append(name)
    zones = [{"offsets": json.loads(offsets), "names": names} for offsets, names in alike.items()]
    lines = (",\n".join(map(json.dumps, each)) for each in (durations, zones))
    return '{{"durations": [\n{}\n], "timeZones": [\n{}\n]}}\n'.format(*lines)


def _durations(part: Any, known: Any, place: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of a schema
    """Yield the places of durations, and the schemas of their numbers."""
    if "$ref" in part:
        part = known[part["$ref"].rpartition("/")[2]]
    for key, each in part.get("properties", {}).items():
        yield from _durations(each, known, f"{place}.{key}".lstrip("."))
    if "items" in part:
        yield from _durations(part["items"], known, f"{place}.*")
    members = part.get("anyOf", [])
    if any("(ms|s|m|h|d)" in each.get("pattern", "") for each in members):
        yield place, members[0]


def _offsets(zone: ZoneInfo) -> list[tuple[int, int]]:
    """Return from when on, Unix seconds, a zone is how many seconds from UTC; the first from the beginning."""
    found = [(0, _offset(zone, _YEAR))]
    for day in (_YEAR + timedelta(days=count) for count in range(_DAYS)):
        if _offset(zone, day + timedelta(days=1)) != found[-1][1]:
            minutes = (day + timedelta(minutes=count) for count in range(24 * 60 + 1))
            changed = next(moment for moment in minutes if _offset(zone, moment) != found[-1][1])
            found.append((int(changed.timestamp()), _offset(zone, changed)))
    return found


def _offset(zone: ZoneInfo, moment: datetime) -> int:
    offset = moment.astimezone(zone).utcoffset()
    return 0 if offset is None else int(offset.total_seconds())


if __name__ == "__main__":
    FILE.write_text(policy_rules(), encoding="utf-8")

"""What `--workload` means: fixed lengths NxINxOUT, random lengths INxOUT or INxOUT~S, or a trace.

A trace is a file (Azure's CSV, Mooncake's JSON lines, a JSON list of {start_time, prompt_len, output_len}) or the name
of a slice that comes with pdserve. An error in a file names the file, the line or entry, and the field. An autoscaler
learns the demand of a trace, by forecast intervals, before its first forecast (`warm_up`).
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, ValidationError

from pdserve.base.errors import ConfigError
from pdserve.measure.workload import SPREAD, Arrival, Workload, fixed_lengths, random_lengths

if TYPE_CHECKING:
    from pdserve.autoscaler.schema import Policy

MOONCAKE_BLOCK = 512  # tokens that one of its hashes stands for

MAX_INTERVALS = 50_000  # of a warm-up: the last ones of a longer trace

_MOST_REQUESTS, _MOST_TOKENS, _MOST_SPREAD = 999_999, 1_000_000, 3.0

_Count = Annotated[int, Field(ge=1)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Places = Iterable[tuple[str, object]]  # where in a file, and what stands there


class _Azure(BaseModel):
    TIMESTAMP: datetime
    ContextTokens: _Count
    GeneratedTokens: _Count

    def arrival(self) -> Arrival:
        return Arrival(self.TIMESTAMP.replace(tzinfo=UTC).timestamp(), self.ContextTokens, self.GeneratedTokens)


class _Mooncake(BaseModel):
    timestamp: _Time  # milliseconds
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]

    def arrival(self) -> Arrival:
        return Arrival(self.timestamp / 1e3, self.input_length, self.output_length, self.hash_ids)


class _Listed(BaseModel, extra="forbid"):
    start_time: _Time  # seconds
    prompt_len: _Count
    output_len: _Count

    def arrival(self) -> Arrival:
        return Arrival(self.start_time, self.prompt_len, self.output_len)


def _csv_rows(text: str) -> Iterator[tuple[str, object]]:
    return ((f"line {number}", row) for number, row in enumerate(csv.DictReader(text.splitlines()), start=2))


def _json_lines(text: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", line


def _json_list(text: str) -> Iterator[tuple[str, object]]:
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("it has to be a list")
    return ((f"entry {number}", row) for number, row in enumerate(rows))


_Row = type[_Azure] | type[_Mooncake] | type[_Listed]
_FORMATS: dict[str, tuple[Callable[[str], _Places], _Row]] = {
    ".csv": (_csv_rows, _Azure),
    ".jsonl": (_json_lines, _Mooncake),
    ".json": (_json_list, _Listed),
}


def parse_workload(text: str, num_requests: int, seed: int) -> Workload:
    """Return the workload of a `--workload`. Of random lengths, there are `num_requests`."""
    lengths, _, spread = text.partition("~")
    try:
        numbers, deviation = [float(part) for part in lengths.split("x")], float(spread or SPREAD)
    except ValueError:
        numbers, deviation = [], SPREAD
    match numbers:
        case [count, prompt_tokens, output_tokens] if not spread:
            _check(text, "requests", _MOST_REQUESTS, count)
            _check(text, "tokens", _MOST_TOKENS, prompt_tokens, output_tokens)
            if not all(number.is_integer() for number in numbers):
                raise ConfigError(f"--workload: {text!r}: NxINxOUT takes whole numbers")
            return fixed_lengths(text, *map(int, numbers))
        case [prompt_tokens, output_tokens]:
            _check(text, "tokens", _MOST_TOKENS, prompt_tokens, output_tokens)
            if not 0 <= deviation <= _MOST_SPREAD:
                raise ConfigError(
                    f"--workload: {text!r}: a spread of {deviation:g}, from 0 to {_MOST_SPREAD:g} is possible"
                )
            return random_lengths(num_requests, prompt_tokens, output_tokens, seed, deviation)
        case _:
            pass
    path = trace_path(text)
    if path.suffix not in _FORMATS and not path.is_file():
        raise ConfigError(f"--workload: {text!r} is neither a trace nor INxOUT nor NxINxOUT, for example 16x32x128")
    return read_trace(path)


def _check(text: str, what: str, most: int, *numbers: float) -> None:
    for number in numbers:
        if not 1 <= number <= most:
            raise ConfigError(f"--workload: {text!r}: {number:g} {what}, from 1 to {most} are possible")


def trace_path(text: str) -> Path:
    """Return a shipped slice of a trace by its name, or the path that the text is."""
    shipped = {path.stem: path for path in Path(__file__).with_name("traces").iterdir() if path.suffix != ".md"}
    return shipped.get(text, Path(text))


def read_trace(path: Path) -> Workload:
    """Read a trace, its requests in the order of time."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: known are {', '.join(_FORMATS)}")
    rows_of, row_type = _FORMATS[path.suffix]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        arrivals = [_read(path, place, row_type, row) for place, row in rows_of(text)]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(arrivals) < 2:
        raise ConfigError(f"{path}: {len(arrivals)} requests, at least 2 are needed")
    arrivals.sort(key=lambda each: each.at_s)
    return Workload(path.stem, tuple(arrivals), MOONCAKE_BLOCK if row_type is _Mooncake else 0)


def _read(path: Path, place: str, row_type: _Row, row: object) -> Arrival:
    try:
        read = row_type.model_validate_json(row) if isinstance(row, str) else row_type.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError(f"{path}, {place}: {field}{first['msg']}") from error
    return read.arrival()


def warm_up(policy: "Policy") -> tuple[tuple[float, float], ...]:
    """Return the intervals of a policy's `warmupTrace`, oldest first, as if the last one ended just before the start.

    Each has the prompt tokens to compute and the answer tokens of the requests that came in it, a second. Of a trace
    that names shared blocks, each block is computed once. ConfigError where the trace cannot be read, or is too short.
    """
    name, every_s = policy.forecaster.warmup_trace, policy.interval.forecast_s
    if name is None:
        return ()
    trace = read_trace(trace_path(name))
    arrivals, end_s = trace.arrivals, trace.arrivals[-1].at_s
    span_s = end_s - arrivals[0].at_s
    if span_s < every_s:
        raise ConfigError(
            f"forecaster.warmupTrace: {name} is {span_s:g} s long, less than interval.forecast, {every_s:g} s"
        )
    tokens = [[0.0, 0.0] for _ in range(min(MAX_INTERVALS, int(span_s / every_s)))]
    seen: set[int] = set()
    for each in arrivals:
        num_cached = sum(1 for _ in takewhile(seen.__contains__, each.blocks)) * trace.block_tokens
        seen.update(each.blocks)
        age = int((end_s - each.at_s) / every_s)
        if age < len(tokens):
            tokens[age][0] += max(1, each.prompt_tokens - num_cached) / every_s
            tokens[age][1] += each.output_tokens / every_s
    return tuple((computed, answered) for computed, answered in reversed(tokens))

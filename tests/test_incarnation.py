"""Names of processes are in the order in which the processes started."""

import pytest

from pdserve.base.clock import new_incarnation


def test_the_later_of_two_processes_has_the_greater_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    started_ns = [1_790_000_000_000_000_000 + 1_000_000 * milliseconds for milliseconds in range(100)]
    clock = iter(started_ns)
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    incarnations = [new_incarnation() for _ in started_ns]
    assert incarnations == sorted(incarnations)
    assert [incarnation >> 22 for incarnation in incarnations] == [ns // 1_000_000 for ns in started_ns]


def test_two_processes_that_start_in_one_millisecond_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1_790_000_000_000_000_000)
    assert len({new_incarnation() for _ in range(20)}) == 20


def test_an_incarnation_fits_into_64_bits_for_a_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: (2**42 - 1) * 1_000_000)  # in the year 2109
    assert new_incarnation() < 2**64

"""A forecaster is warmed up with the demand of a trace, interval by interval, up to its last request."""

import json
from pathlib import Path

import pytest

from pdserve.autoscaler.schema import Policy
from pdserve.base.errors import ConfigError
from pdserve.measure import read_workload as module
from pdserve.measure.read_workload import warm_up


def policy_with(trace: Path | None, forecast: str = "10s") -> Policy:
    pool = {"maxReplicas": 2}
    return Policy.model_validate(
        {
            "apiVersion": "pdserve/v1alpha1",
            "kind": "AutoscalingPolicy",
            "objectives": {"ttftMs": 500, "tpotMs": 50},
            "budget": {"maxDevices": 4},
            "interval": {"forecast": forecast, "react": "1s"},
            "forecaster": {"kind": "last", **({} if trace is None else {"warmupTrace": str(trace)})},
            "pools": {"prefill": pool, "decode": pool},
        }
    )


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    requests = [(0.0, 100, 10), (5.0, 100, 10), (16.0, 200, 20), (24.0, 50, 30), (26.0, 50, 30)]
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps([{"start_time": at_s, "prompt_len": len_, "output_len": out} for at_s, len_, out in requests])
    )
    return path


def test_each_interval_has_its_tokens_a_second_and_the_last_ends_with_the_trace(listed: Path) -> None:
    intervals = warm_up(policy_with(listed))
    assert len(intervals) == 2  # what came before them filled no interval
    assert intervals[1] == pytest.approx(((50 + 50) / 10, 60 / 10))
    assert intervals[0] == pytest.approx((200 / 10, 20 / 10))


def test_without_a_trace_nothing_is_learnt() -> None:
    assert warm_up(policy_with(None)) == ()


def test_a_trace_shorter_than_an_interval_is_refused(listed: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmupTrace: .* is 26 s long, less than interval.forecast, 60 s"):
        warm_up(policy_with(listed, "60s"))
    with pytest.raises(ConfigError, match="No such file"):
        warm_up(policy_with(listed.with_name("none.json")))


def test_of_a_long_trace_the_last_intervals_count(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INTERVALS", 1)
    assert warm_up(policy_with(listed)) == (pytest.approx((10.0, 6.0)),)


def test_shared_blocks_are_computed_once(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 9_000, "input_length": 1030, "output_length": 1, "hash_ids": [1, 2, 4]},
        {"timestamp": 19_500, "input_length": 1030, "output_length": 1, "hash_ids": [1, 2, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [computed for computed, _ in warm_up(policy_with(path))] == pytest.approx([0.6])


def test_a_shipped_trace_is_named_as_elsewhere() -> None:
    intervals = warm_up(policy_with(Path("azure-conv"), "1m"))
    assert len(intervals) > 1
    assert all(computed > 0 and answered > 0 for computed, answered in intervals)

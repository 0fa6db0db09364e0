"""What presses at this moment asks for as many replicas as it takes, and for none where chance explains it."""

import pytest
from scaled_world import CAPACITY

from pdserve.autoscaler.observation import Observation, Replica, State
from pdserve.autoscaler.pools import Signal
from pdserve.autoscaler.urgent import for_backlog, for_batches, for_losses, for_signals
from pdserve.roles import Role


@pytest.mark.parametrize(
    ("backlog_s", "offered", "startup_s", "wanted"),
    [
        (0.0, 5.0, 30.0, 0),  # nothing waits
        (0.4, 0.1, 30.0, 1),  # one is done with it long before another has started
        (4.0, 0.0, 0.0, 8),  # all of it within half a second
        (45.0, 1.5, 30.0, 3),  # 90 s of work within 30.5 s
    ],
)
def test_a_backlog_is_worked_off_until_another_replica_would_serve(
    backlog_s: float, offered: float, startup_s: float, wanted: int
) -> None:
    assert for_backlog(backlog_s, offered, startup_s, ttft_s=0.5) == wanted


def decoding(num_sequences: int, kv_tokens: int) -> Replica:
    return Replica("decode-0", Role.DECODE, State.READY, 0.0, num_sequences, 0, kv_tokens)


def computing(num_sequences: int, waiting_tokens: int, kv_tokens: int = 0) -> Replica:
    return Replica("prefill-0", Role.PREFILL, State.READY, 0.0, num_sequences, waiting_tokens, kv_tokens)


@pytest.mark.parametrize(
    ("replicas", "coming", "wanted"),
    [
        ([], [], 0),
        ([decoding(20, 0), decoding(20, 0)], [], 2),
        ([decoding(20, 0), decoding(21, 0)], [], 3),  # 20 fit on each
        ([decoding(1, 995_000), decoding(1, 10_000)], [], 2),  # a replica holds a million KV tokens
        ([decoding(20, 0)], [computing(21, 0)], 3),  # those whose prompts are computed have their place already
        ([decoding(1, 990_000)], [computing(1, 10_000), computing(1, 0, 10_000)], 2),  # and their pages
        ([decoding(1, 0)], [computing(1, 500_000, 500_001)], 2),  # also for the half that is computed already
    ],
)
def test_the_sequences_that_run_and_that_come_have_to_fit(
    replicas: list[Replica], coming: list[Replica], wanted: int
) -> None:
    assert for_batches(replicas, coming, 20, CAPACITY) == wanted


@pytest.mark.parametrize(
    ("num_lost", "num_requests", "wanted"),
    [
        (0, 1000, 0),
        (7, 14, 0),  # too few to tell
        (50, 1000, 0),  # as many as the objective allows
        (58, 1000, 0),  # more, but chance may explain it
        (200, 1000, 5),  # 4 serve what 82 % are, at least
        (1000, 1000, 8),  # twice as many at once, at most
    ],
)
def test_what_was_lost_asks_for_as_many_as_would_have_served_it(num_lost: int, num_requests: int, wanted: int) -> None:
    assert for_losses(num_lost, num_requests, 4.0, attainment=0.95) == wanted


@pytest.mark.parametrize(
    ("metric", "target", "margin", "wanted"),
    [
        ("queue_tokens", 100.0, 1.0, 3),
        ("queue_tokens", 150.0, 1.0, 2),
        ("queue_tokens", 150.0, 1.1, 3),
        ("kv_usage", 0.2, 1.0, 2),
        ("running_sequences", 4.0, 1.0, 2),
        ("held_requests", 2.0, 1.0, 5),
    ],
)
def test_a_signal_asks_for_its_target_on_average(metric: str, target: float, margin: float, wanted: int) -> None:
    busy = Replica("decode-0", Role.DECODE, State.READY, 0.0, 8, 300, 400_000)
    seen = Observation(0.0, 0.0, (busy,), None, num_held=10, capacities={Role.DECODE: CAPACITY})
    signal = Signal.model_validate({"metric": metric, "target": target})
    assert for_signals([signal], [busy], seen, Role.DECODE, margin) == wanted

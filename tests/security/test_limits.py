"""A tenant's limits hold over any time, whatever comes when, and a refusal says truly when to try again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.protocol.refusal import Cause
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.frontend.limits import Use

waits = st.sampled_from((0.0, 0.01, 0.4, 3.0))
steps = st.lists(st.tuples(waits, st.integers(0, 20), st.booleans()), min_size=20, max_size=60)


@settings(max_examples=60)
@given(
    steps,
    st.floats(0.1, 5),
    st.none() | st.integers(1, 4),
    st.integers(1, 8),
    st.floats(1, 50),
)
def test_limits_hold_over_any_time(
    steps: list[tuple[float, int, bool]], rate: float, burst: int | None, max_concurrent: int, tokens_per_s: float
) -> None:
    limits = TenantLimits(requests_per_s=rate, burst=burst, max_concurrent=max_concurrent, tokens_per_s=tokens_per_s)
    use, now_s, running, begun, spent = Use(), 100.0, 0, list[float](), 0.0
    for wait_s, tokens, ends in steps:
        now_s += wait_s
        if ends and running:
            running -= 1
            use.spend(tokens)
            spent += tokens
            use.end()
            continue
        before = spent
        refused = use.begin(limits, now_s)
        if refused is None:
            running += 1
            begun.append(now_s)
            assert before <= tokens_per_s * (1 + now_s - 100.0) + 1e-6
        else:
            assert refused.retry_after_s is not None
            assert refused.retry_after_s > 0
    assert use.num_running == running <= max_concurrent
    size = burst or max(1, -(-rate // 1))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            assert last - first + 1 <= size + rate * (begun[last] - begun[first]) + 1e-6


@settings(max_examples=60)
@given(st.floats(0.1, 20), st.integers(1, 5), st.integers(1, 500))
def test_after_the_time_that_a_refusal_names_a_request_is_taken(rate: float, burst: int, tokens: int) -> None:
    limits = TenantLimits(requests_per_s=rate, burst=burst, tokens_per_s=rate)
    use, now_s = Use(), 5.0
    for _ in range(20):
        refused = use.begin(limits, now_s)
        if refused is None:
            use.spend(tokens)
            use.end()
            continue
        assert refused.cause in (Cause.TENANT_REQUESTS, Cause.TENANT_TOKENS)
        assert refused.retry_after_s is not None
        now_s += refused.retry_after_s + 1e-6
        again = use.begin(limits, now_s)
        if again is not None:  # of the other limit
            assert again.cause is not refused.cause
        else:
            use.spend(tokens)
            use.end()


def test_no_limit_refuses_nothing_and_a_limit_that_comes_later_holds_at_once() -> None:
    use, open_, narrow = Use(), TenantLimits(), TenantLimits(max_concurrent=3, requests_per_s=1)
    for _ in range(100):
        assert use.begin(open_, 1.0) is None
        use.spend(10)
    refused = use.begin(narrow, 1.0)
    assert refused is not None
    assert refused.cause is Cause.TENANT_CONCURRENCY


def test_tokens_without_a_limit_are_no_debt_under_a_later_one() -> None:
    use, open_, limited = Use(), TenantLimits(), TenantLimits(tokens_per_s=1)
    assert use.begin(limited, 1.0) is None
    assert use.begin(open_, 1.0) is None
    use.spend(1000)
    assert use.begin(limited, 1.0) is None

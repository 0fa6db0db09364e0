"""What an autoscaler learns before its first forecast: the demand of a trace, by forecast intervals."""

from itertools import takewhile

from pdserve.autoscaler.schema import Policy
from pdserve.errors import ConfigError
from pdserve.measure.read_workload import read_trace, trace_path

MAX_INTERVALS = 50_000  # the last ones of a longer trace


def warm_up(policy: Policy) -> tuple[tuple[float, float], ...]:
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

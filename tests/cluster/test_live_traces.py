"""One trace over all processes of a cluster, and logs that name it."""

import json
from pathlib import Path

import cluster_logs
import pytest
from live_cluster import greedy, live_cluster
from otlp_sink import Received, collector_beside

from pdserve.tracecontext import TraceContext

pytestmark = pytest.mark.slow
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)
CLOCK_S = 0.01  # the two clocks are read one after the other
BY_PROCESS = {
    "router": {"tokenize", "admit", "place", "send", "prefill.queue", "prefill", "first_token", "decode"},
    "prefill-0": {"prefill.queue", "prefill", "handoff.send"},
    "decode-0": {"handoff.receive", "decode.queue", "decode"},
}


def within(span: Received, other: Received) -> bool:
    starts, ends = span.span.start_time_unix_nano, span.span.end_time_unix_nano
    return (
        other.span.start_time_unix_nano - CLOCK_S * 1e9
        <= starts
        <= ends
        <= other.span.end_time_unix_nano + CLOCK_S * 1e9
    )


def test_a_trace_goes_through_all_processes_and_their_logs_name_it(tmp_path: Path, model: Path) -> None:
    request = greedy(range(5, 45), 12)
    request.traceparent = CLIENT.traceparent
    with collector_beside() as beside:
        flags = ("--otlp-traces-endpoint", beside.sink.address, "--log-format", "json", "--enable-log-requests")
        with live_cluster(tmp_path, model, *flags) as cluster:
            answer = cluster.generate(request)
            beside.until(lambda: {span.instance for span in beside.sink.spans} == set(BY_PROCESS))
            logs = dict(cluster_logs.of_cluster(tmp_path))
        spans = beside.sink.spans
    (root,) = (span for span in spans if span.span.kind == span.span.SPAN_KIND_SERVER)
    assert {span.span.trace_id.hex() for span in spans} == {CLIENT.trace_id}
    assert root.span.parent_span_id.hex() == CLIENT.span_id
    below = [span for span in spans if span is not root]
    assert all(span.span.parent_span_id == root.span.span_id for span in below)
    assert all(within(span, root) for span in below if span.instance != "router")
    for process, names in BY_PROCESS.items():
        assert names <= {span.name for span in below if span.instance == process}
    (prefill,) = (span for span in below if (span.instance, span.name) == ("prefill-0", "prefill"))
    (decode,) = (span for span in below if (span.instance, span.name) == ("decode-0", "decode"))
    assert prefill.span.end_time_unix_nano <= decode.span.start_time_unix_nano
    sent = [span for span in below if span.name == "handoff.receive"]
    assert sent[0].attributes["pdserve.handoff.bytes"] == answer.ledger.handoff_bytes
    lines = [json.loads(line) for name in BY_PROCESS for line in logs[name].splitlines()]
    assert {line["process"] for line in lines} == set(BY_PROCESS)
    (ended,) = (line for line in lines if "request_id" in line)
    assert (ended["trace_id"], ended["status"], ended["completion_tokens"]) == (CLIENT.trace_id, "OK", 12)

"""One trace over all processes of a cluster, and logs that name it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import quantiles

import cluster_logs
import pytest
import waiting_client
from live_cluster import greedy, live_cluster
from otlp_sink import Received, collector_beside

from pdserve.observe.trace_context import TraceContext

pytestmark = pytest.mark.slow
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)
CLOCK_MS = 10.0  # the two clocks are read one after the other
NUM_WAITS = 1000
WITHIN_MS = 2.0
DELAYED_MS = 1.0  # that the router waited for a processor: longer waits are other processes' doing
MIN_JUDGED = 50  # on a machine that is busy with other things; else nearly all
ROUNDED_MS = 2e-3
UP_TO_FIRST_TOKEN = {"tokenize", "admit", "place", "send", "fetch", "prefill.queue", "prefill", "first_token"}
BY_PROCESS = {
    "router": {"tokenize", "admit", "place", "send", "prefill.queue", "prefill", "first_token", "decode"},
    "prefill-0": {"prefill.queue", "prefill", "handoff.send"},
    "decode-0": {"handoff.receive", "decode.queue", "decode"},
}


def outside_ms(span: Received, root: Received) -> float:
    """Return by how much a span begins before the root, or ends after it.

    A sender may learn after a short answer's end that its pages were taken: its span has to begin within the root.
    """
    before_ns = root.span.start_time_unix_nano - span.span.start_time_unix_nano
    last_ns = span.span.start_time_unix_nano if span.name == "handoff.send" else span.span.end_time_unix_nano
    assert span.span.start_time_unix_nano <= span.span.end_time_unix_nano
    return max(before_ns, last_ns - root.span.end_time_unix_nano) / 1e6


@pytest.mark.long
def test_a_trace_goes_through_all_processes_and_their_logs_name_it(tmp_path: Path, model: Path) -> None:
    request = greedy(range(5, 45), 12)
    request.traceparent = CLIENT.traceparent
    with collector_beside() as beside:
        flags = ("--otlp-traces-endpoint", beside.sink.address, "--log-format", "json", "--enable-log-requests")
        flags += ("--otlp-traces-sample-ratio", "0")  # none but the client's
        with live_cluster(tmp_path, model, *flags) as cluster:
            answer = cluster.generate(request)
            beside.until(lambda: {span.instance for span in beside.sink.spans} == set(BY_PROCESS))
            run_a_batch(tmp_path)
            logs = dict(cluster_logs.of_cluster(tmp_path))
        spans = beside.sink.spans
    (root,) = (span for span in spans if span.span.kind == span.span.SPAN_KIND_SERVER)
    assert {span.span.trace_id.hex() for span in spans} == {CLIENT.trace_id}
    assert root.span.parent_span_id.hex() == CLIENT.span_id
    below = [span for span in spans if span is not root]
    assert all(span.span.parent_span_id == root.span.span_id for span in below)
    late_ms = {each.name: outside_ms(each, root) for each in below if each.instance != "router"}
    assert max(late_ms.values()) <= CLOCK_MS, late_ms
    for process, names in BY_PROCESS.items():
        assert names <= {span.name for span in below if span.instance == process}
    (prefill,) = (span for span in below if (span.instance, span.name) == ("prefill-0", "prefill"))
    (decode,) = (span for span in below if (span.instance, span.name) == ("decode-0", "decode"))
    assert prefill.span.end_time_unix_nano <= decode.span.start_time_unix_nano
    sent = [span for span in below if span.name == "handoff.receive"]
    assert sent[0].attributes["pdserve.handoff.bytes"] == answer.ledger.handoff_bytes
    lines = [json.loads(line) for name in BY_PROCESS for line in logs[name].splitlines()]
    assert {line["process"] for line in lines} == set(BY_PROCESS)
    traced, batched = (line for line in lines if "request_id" in line)
    assert (traced["trace_id"], traced["status"], traced["completion_tokens"]) == (CLIENT.trace_id, "OK", 12)
    assert (batched["status"], batched["completion_tokens"]) == ("OK", 4)
    assert "trace_id" not in batched


@pytest.mark.long
def test_ledger_spans_and_page_add_up_to_what_a_client_waits_for(tmp_path: Path, model: Path) -> None:
    with collector_beside() as beside:
        with live_cluster(tmp_path, model, "--otlp-traces-endpoint", beside.sink.address) as cluster:
            asked = (cluster.state.http.removeprefix("http://"), str(cluster.pid_of("router")), str(NUM_WAITS))
            client = [sys.executable, waiting_client.__file__, *asked]
            run = subprocess.run(client, check=True, capture_output=True, text=True, timeout=300)
            waits = [json.loads(line) for line in run.stdout.splitlines()]
            beside.until(lambda: len(roots(beside.sink.spans)) == NUM_WAITS)
        in_spans = up_to_first_token_ms(beside.sink.spans)
    for wait in waits:
        ledger, timeline = wait["ledger"], wait["page"]["ledger"]
        on_page = {step["name"]: step.get("at_ms", 0.0) for step in timeline["steps"]}
        assert on_page == pytest.approx(ledger["timings_ms"], abs=ROUNDED_MS)
        assert in_spans[ledger["request_id"]] == pytest.approx(ledger["timings_ms"]["first_token"], abs=ROUNDED_MS)
    judged = [wait for wait in waits if wait["delay_ms"] <= DELAYED_MS]
    gaps_ms = [wait["ttft_ms"] - wait["ledger"]["timings_ms"]["first_token"] for wait in judged]
    assert len(judged) >= MIN_JUDGED
    assert quantiles(gaps_ms, n=20)[-1] <= WITHIN_MS


def roots(spans: list[Received]) -> list[Received]:
    return [span for span in spans if span.span.kind == span.span.SPAN_KIND_SERVER]


def up_to_first_token_ms(spans: list[Received]) -> dict[object, float]:
    """Return the summed lengths of the router's spans that end at the first token or before, by request."""
    names = {span.span.span_id: span.attributes["gen_ai.response.id"] for span in roots(spans)}
    sums = dict.fromkeys(names.values(), 0.0)
    for span in spans:
        if span.instance == "router" and span.name in UP_TO_FIRST_TOKEN:
            sums[names[span.span.parent_span_id]] += 1e3 * span.seconds
    return sums


def run_a_batch(folder: Path) -> None:
    """Let the cluster of this machine answer a file of one request."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    command = [sys.executable, "-P", "-m", "pdserve", "run-batch", "in.jsonl", "-o", "out.jsonl"]
    subprocess.run(command, cwd=folder, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)}, check=True, timeout=60)
    result = json.loads((folder / "out.jsonl").read_text())
    assert (result["custom_id"], result["response"]["status_code"], result["error"]) == ("one", 200, None)

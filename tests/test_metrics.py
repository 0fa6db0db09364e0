"""The names of metrics, what counts them, and the HTTP door behind which they are."""

import asyncio
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_metrics import SHOWN
from two_workers import Workers

from pdserve.base.errors import ConfigError
from pdserve.engine.step import StepResult
from pdserve.launch.authority import Authority, write_certificates
from pdserve.launch.folder import write_secret
from pdserve.net.certificates import IDENTITY_FILES, Part, public_files
from pdserve.net.credentials import Credentials
from pdserve.observe import metrics
from pdserve.observe.metrics import Distribution, Kind, Metric, Sample, families, span_samples
from pdserve.observe.metrics_server import MAX_CONNECTIONS, showing
from pdserve.perfmodel.curve import Step
from pdserve.protocol.drafts import DraftSource, Verified
from pdserve.router.config import RouterConfig
from pdserve.settings.process import ProcessConfig
from pdserve.worker.reporting import Steps, handoff_samples, load_samples, refusal_samples

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
ALL = {metric.name: metric for shown in SHOWN.values() for metric in shown}


def row(metric: Metric) -> str:
    """Return a metric's row in the documentation."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    shown_by = ", ".join(process for process, shown in SHOWN.items() if metric in shown)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {shown_by} | {metric.meaning} |"


def test_the_documentation_has_each_metric_and_no_other() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(("| `vllm:", "| `pdserve_"))]
    assert sorted(rows) == sorted(map(row, ALL.values()))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9))))
def test_each_bucket_counts_the_values_that_are_at_most_its_bound(seen: list[tuple[float, int]]) -> None:
    distribution = Distribution(metrics.ITL)
    for amount, count in seen:
        distribution.observe(amount, count)
    for bound, count in distribution.buckets():
        assert count == sum(times for amount, times in seen if amount <= float(bound.replace("+Inf", "inf")))
    assert distribution.total == pytest.approx(sum(amount * count for amount, count in seen))


@pytest.mark.parametrize(("metric", "amount"), [(metrics.HELD, Distribution(metrics.ITL)), (metrics.ITL, 1.0)])
def test_a_number_is_no_histogram(metric: Metric, amount: float | Distribution) -> None:
    with pytest.raises(TypeError, match=metric.name):
        list(families([Sample(metric, amount)]))


def test_a_worker_shows_its_metrics_and_no_others() -> None:
    node = Workers().nodes["s"]
    steps = Steps()
    steps.note(Step(100, 10_000, 3, 30), 0.02, 4)
    steps.note(Step(0, 0, 4, 40), 0.01, 4)
    steps.note(Step(sequences=5, kv_tokens=50, guesses=4, kept_guesses=3), 0.01, 4)
    steps.note_verified([Verified(DraftSource.NGRAM, 4, 3), Verified(DraftSource.SUFFIX, 2, 1)])
    drafting = {"draft_s": 0.004, "take_in_s": 0.002}
    result = StepResult((), 0.01, expert_ratios=(1.0, 2.5, 2.75), num_draft_failures=1, **drafting)
    steps.note_result(result)
    samples = [
        *steps.samples("m", DraftSource.SUFFIX),
        *load_samples(node.core.load(), node.scheduler.cache, "m"),
        *handoff_samples(node.core),
        *refusal_samples({}),
        *span_samples({}),
    ]
    assert {sample.metric for sample in samples} == set(SHOWN["worker"])
    assert all(len(sample.labels) == len(sample.metric.labels) for sample in samples)
    numbers = {sample.metric: sample.amount for sample in samples if sample.metric.kind is not Kind.HISTOGRAM}
    assert (numbers[metrics.COMPUTED_TOKENS], numbers[metrics.SAMPLED_TOKENS]) == (100, 12)
    assert numbers[metrics.DRAFT_FAILURES] == 1
    took = {sample.labels[2]: sample.amount for sample in samples if sample.metric is metrics.DRAFT_SECONDS}
    assert took == {"guess": 0.004, "take_in": 0.002}
    of_drafts = metrics.DRAFTS, metrics.DRAFT_TOKENS, metrics.ACCEPTED_TOKENS
    counts = {(sample.metric, sample.labels[1]): sample.amount for sample in samples if sample.metric in of_drafts}
    assert [counts[metric, "ngram"] for metric in of_drafts] == [1, 4, 3]
    assert [counts[metric, "suffix"] for metric in of_drafts] == [1, 2, 1]
    accepted = {sample.labels[1:]: sample.amount for sample in samples if sample.metric is metrics.ACCEPTED_PER_POS}
    assert accepted == {("0", "ngram"): 1, ("1", "ngram"): 1, ("2", "ngram"): 1, ("0", "suffix"): 1}
    shown = {sample.metric for sample in steps.samples("m", None)}
    of_guesses = {each for each in shown if "draft" in each.name or "spec_decode" in each.name}
    assert not of_guesses, "nothing guesses"
    (gaps,) = [sample.amount for sample in samples if sample.metric is metrics.ITL]
    assert isinstance(gaps, Distribution)
    assert (gaps.buckets()[0], gaps.buckets()[1]) == (("0.01", 5.0), ("0.025", 8.0))
    (ratios,) = [sample.amount for sample in samples if sample.metric is metrics.EXPERT_RATIO]
    assert isinstance(ratios, Distribution)
    assert (ratios.count, ratios.total) == (3, 6.25)


@pytest.mark.parametrize("source", [DraftSource.SUFFIX, DraftSource.MTP])
def test_counters_of_the_method_that_guesses_are_there_from_the_start_and_stay(source: DraftSource) -> None:
    steps = Steps()

    def shown() -> dict[str, float | Distribution]:
        counts = [sample for sample in steps.samples("m", source) if sample.metric is metrics.DRAFTS]
        return {sample.labels[1]: sample.amount for sample in counts}

    assert shown() == {source: 0}
    steps.note_verified([Verified(DraftSource.NGRAM, 4, 1)])
    assert shown() == {source: 0, "ngram": 1}


def one() -> Iterator[Sample]:
    yield Sample(metrics.HELD, 1)


async def ask(address: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""  # it was not read
    finally:
        writer.close()


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"\r\n\r\n"])
async def test_only_metrics_are_there_to_get(request_: bytes) -> None:
    async with showing(ProcessConfig(), one) as address:
        assert (await ask(address, request_)).startswith(b"HTTP/1.1 404 ")


async def test_what_is_no_request_ends_the_connection() -> None:
    async with showing(ProcessConfig(), one) as address:
        assert await ask(address, b"x" * 100_000) == b""


async def test_connections_that_ask_nothing_are_bounded_and_keep_nobody_out_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.observe.metrics_server.REQUEST_TIMEOUT_S", 0.2)
    get = b"GET /metrics HTTP/1.1\r\n\r\n"
    async with showing(ProcessConfig(), one) as address:
        silent = [await asyncio.open_connection(*address.split(":")) for _ in range(MAX_CONNECTIONS)]
        assert await ask(address, get) == b""
        assert [await reader.read() for reader, _ in silent] == [b""] * MAX_CONNECTIONS
        assert b"pdserve_requests_held 1.0" in await ask(address, get)
        for _, writer in silent:
            writer.close()


async def test_the_end_of_each_certificate_is_that_of_the_last_one_that_was_taken(tmp_path: Path) -> None:
    write_certificates(tmp_path, ("localhost",), 7)
    certificate, key = public_files(tmp_path)
    config = RouterConfig(model="m", secret_file=tmp_path, ssl_certfile=certificate, ssl_keyfile=key)
    identity = Credentials.read(write_secret(tmp_path), tmp_path / "router", Part.ROUTER).identity
    async with showing(config, one, identity) as address:

        async def ends() -> dict[str, float]:
            text = (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")).decode()
            found = re.findall(r'^pdserve_certificate_not_after_\w+{certificate="(\w+)"} (\S+)$', text, re.MULTILINE)
            return {name: float(at) for name, at in found}

        before = await ends()
        assert before.keys() == {"identity", "public"}
        assert all(abs(at - time.time() - 7 * 86_400) < 86_400 for at in before.values())
        write_certificates(tmp_path, ("localhost",), 30)
        renewed = await ends()
        assert all(at > before[name] + 20 * 86_400 for name, at in renewed.items())
        Authority.new().write_public(tmp_path / "other", ("localhost",), timedelta(days=90))
        certificate.write_bytes((tmp_path / "other" / "tls.crt").read_bytes())  # without its key
        write_certificates(tmp_path / "other", ("localhost",), 90)
        for name in IDENTITY_FILES:  # of another part
            (tmp_path / "router" / name).write_bytes((tmp_path / "other" / "worker" / name).read_bytes())
        assert await ends() == renewed


async def test_a_port_that_is_taken_is_refused_by_name_and_metrics_can_be_turned_off() -> None:
    async with showing(ProcessConfig(), one) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
            async with showing(ProcessConfig(metrics_port=port), one):
                pass
    async with showing(ProcessConfig(metrics=False), one) as address:
        assert address == ""

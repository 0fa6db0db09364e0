"""All metrics of all processes: names, kinds, labels, meanings. docs/metrics.md has the table.

No decision reads or counts a metric: shells count what passes through them, and read the rest from the cores at each
scrape. Label values are members of enumerations and the name of the one model.

Names that begin with `vllm:` are vLLM's, with vLLM's buckets, so that dashboards for vLLM, and gateways that choose
among vLLM servers, work with pdserve.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from enum import StrEnum
from itertools import accumulate, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from pdserve.base.values import value

if TYPE_CHECKING:
    from pdserve.net.credentials import Connections


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


_FAMILIES: Mapping[Kind, Callable[..., Any]] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


@value
class Metric:
    """One name. Values of all its labels name a series."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, the infinite one left out


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, meaning, labels)


def _histogram(name: str, meaning: str, bounds: Seq[float], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, meaning, labels, tuple(bounds))


_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
_STEP_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
_HANDOFF_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)

_EXPERT_RATIO = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)

_MODEL = "model_name"
_CLASS = "priority_class"

# ---- what a gateway chooses by: a router shows its own requests and the pages of its fullest pool, a worker its own
WAITING = _gauge("vllm:num_requests_waiting", "Requests whose computation has not begun.", _MODEL)
RUNNING = _gauge("vllm:num_requests_running", "Requests that are being computed.", _MODEL)
KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", _MODEL)

# ---- routers: requests that got their answers, each counted at its end
TTFT = _histogram(
    "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_S, _MODEL
)
TPOT = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time between a request's tokens after the first.",
    _TOKEN_S,
    _MODEL,
)
E2E = _histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", _LATENCY_S, _MODEL)
QUEUE = _histogram(
    "vllm:request_queue_time_seconds", "From a request's arrival to the start of its prompt.", _LATENCY_S, _MODEL
)
PREFILL = _histogram(
    "vllm:request_prefill_time_seconds", "From the start of a prompt to the first token.", _LATENCY_S, _MODEL
)
DECODE = _histogram("vllm:request_decode_time_seconds", "From the first token to the last.", _LATENCY_S, _MODEL)
INFERENCE = _histogram(
    "vllm:request_inference_time_seconds", "From the start of a prompt to the last token.", _LATENCY_S, _MODEL
)
POOLED = _histogram(
    "pdserve_pooled_seconds",
    "From a request's arrival to the vector of its prompt, where one was asked for.",
    _FIRST_TOKEN_S,
)
PROMPT_TOKENS = _histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS, _MODEL)
ANSWER_TOKENS = _histogram("vllm:request_generation_tokens", "Tokens of a request's answers.", _TOKENS, _MODEL)
FINISHED = _counter("vllm:request_success_total", "Answers, by why they ended.", _MODEL, "finished_reason")
CACHE_QUERIES = _counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up in a cache.", _MODEL)
CACHE_HITS = _counter("vllm:prefix_cache_hits_total", "Prompt tokens that were found in a cache.", _MODEL)
HANDOFF_S = _histogram(
    "pdserve_handoff_seconds", "Of a prompt's hand-off, from when it could be sent until it landed.", _HANDOFF_S
)
HANDOFF_BYTES = _counter("pdserve_handoff_bytes_total", "Bytes of prompts' KV that were handed over.")
OUTCOME_RATIO = _histogram(
    "pdserve_observed_to_predicted_ratio",
    "Observed time divided by the prediction that placed the request.",
    _RATIO,
    "objective",
)

# ---- routers: demand and what becomes of it
ARRIVED = _counter("pdserve_requests_arrived_total", "Valid requests.")
ENDED = _counter("pdserve_requests_ended_total", "Valid requests by how they ended: OK, or a gRPC status.", "status")
INVALID = _counter("pdserve_requests_invalid_total", "Requests that were not valid, by gRPC status.", "status")
REFUSED = _counter(
    "pdserve_requests_refused_total",
    "Valid requests that ended without their answer, by what bound them; clients that left do not count.",
    "cause",
)
DENIED = _counter(
    "pdserve_calls_denied_total",
    "Calls of clients without a known API key, and connections to the HTTP port that ended before TLS was established.",
    "reason",
)
REFUSED_KEY_FILES = _counter(
    "pdserve_api_keys_refused_total", "How often a changed file of API keys was not valid; the old one stays in force."
)
FRONTENDS = _gauge("pdserve_frontends", "Processes that serve clients now; a router that does so itself counts.")
FRONTENDS_LOST = _counter("pdserve_frontends_lost_total", "Frontends whose connections have broken.")
REQUESTS_WITHOUT_ROUTER = _gauge(
    "pdserve_requests_without_router", "Requests of a frontend that wait for a router.", _MODEL
)
REQUESTS_RESUMED = _counter(
    "pdserve_requests_resumed_total", "Requests of a frontend that went from a lost router to another one.", _MODEL
)
RESPONSES_IN_BACKGROUND = _gauge(
    "pdserve_responses_in_background", "Responses that this process computes while no client waits."
)
RESPONSES_FORGOTTEN = _counter(
    "pdserve_responses_forgotten_total",
    "Responses and conversations that this process has forgotten for their tenants' limits; old ones do not count.",
)
ACTIVE = _gauge("pdserve_requests_active", "Requests that are placed.")
HELD = _gauge("pdserve_requests_held", "Requests that wait in the router for a place.")
GOODPUT = _counter("pdserve_goodput_requests_total", "Requests that met all their objectives.", _CLASS)
JUDGED = _counter(
    "pdserve_slo_requests_total",
    "Ended requests that had the objective, refused ones included, by whether they met it.",
    "objective",
    _CLASS,
    "verdict",
)
ATTAINMENT = _gauge(
    "pdserve_slo_attainment_ratio",
    "Share that met the objective of the last 1000 ended requests of a class that had it.",
    "objective",
    _CLASS,
)
REPLACED = _counter("pdserve_placements_again_total", "Placements of requests that had been placed before.")
CONVERSATIONS = _gauge("pdserve_conversations", "Conversations that clients name, of which a router knows the workers.")
CONVERSATIONS_FORGOTTEN = _counter(
    "pdserve_conversations_forgotten_total",
    "Conversations that were forgotten for want of room; old ones do not count.",
)
TURNS = _counter(
    "pdserve_conversation_turns_total",
    "Placed turns of named conversations: new ones, and by whether they kept to the workers of the turn before.",
    "outcome",
)
PREPARED = _counter(
    "pdserve_turns_prepared_total",
    "Preparations of next turns: done, cancelled as the turn came, or refused, because prompts waited.",
    "outcome",
)
MOVES = _counter("pdserve_moves_total", "Moves of running answers: done, or why they failed.", "outcome")
WORKERS = _gauge("pdserve_workers", "Attached workers.", "role", "state")
REFUSED_MESSAGES = _counter(
    "pdserve_messages_refused_total", "Messages of peers that broke the protocol, by what was wrong.", "refusal"
)

SENT, FAILED, DROPPED = SPAN_RESULTS = ("sent", "failed", "dropped")
SPANS = _counter("pdserve_spans_total", "Spans made for the collector of traces: sent, failed or dropped.", "result")

# ---- workers
ITL = _histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a running sequence, by steps.",
    _TOKEN_S,
    _MODEL,
)
STEP_TOKENS = _histogram("vllm:iteration_tokens_total", "Tokens that a step computes.", _STEP_TOKENS, _MODEL)
COMPUTED_TOKENS = _counter("vllm:prompt_tokens_total", "Prompt tokens computed; cached ones are not.", _MODEL)
SAMPLED_TOKENS = _counter("vllm:generation_tokens_total", "Tokens of answers, first ones included.", _MODEL)
DRAFTS = _counter("vllm:spec_decode_num_drafts_total", "Steps of sequences that verified guesses.", _MODEL, "source")
DRAFT_TOKENS = _counter(
    "vllm:spec_decode_num_draft_tokens_total", "Guesses that steps verified, by where they come from.", _MODEL, "source"
)
ACCEPTED_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right, by where they come from.", _MODEL, "source"
)
ACCEPTED_PER_POS = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Guesses that were right, by their place behind the last known token, and where they come from.",
    _MODEL,
    "position",
    "source",
)
DRAFT_SECONDS = _counter(
    "pdserve_draft_model_seconds_total",
    "Time that a draft model or head guessed after steps, and that a head took in what steps computed.",
    _MODEL,
    "source",
    "part",
)
DRAFT_FAILURES = _counter(
    "pdserve_draft_model_failures_total",
    "Failures of a draft model or head. After one in a guess, the worker guesses no more.",
    _MODEL,
    "source",
)
EXPERT_RATIO = _histogram(
    "pdserve_expert_load_ratio",
    "Tokens of a layer's busiest expert divided by the mean of its experts, over each 1024 tokens or more that a "
    "worker computes; a value for each layer with experts.",
    _EXPERT_RATIO,
    _MODEL,
)
PREEMPTIONS = _counter("vllm:num_preemptions_total", "Sequences that gave up their pages to others.", _MODEL)
CACHE_CONFIG = _gauge(
    "vllm:cache_config_info", "Size of a page and number of pages; 1.", "block_size", "num_gpu_blocks"
)
ROLE = _gauge("pdserve_worker_role", "What a worker does; 1.", "role")
DRAINING = _gauge("pdserve_worker_draining", "Whether a worker takes nothing more, 0 or 1.")
PAGES = _gauge(
    "pdserve_kv_pages",
    "Pages by state: free ones are cached or empty, others held, granted to a hand-off, or in quarantine.",
    "state",
)
LEAKED = _gauge("pdserve_kv_pages_leaked", "Held pages that belong to nothing under way: a defect.")
HANDOFFS = _gauge("pdserve_handoffs", "Hand-offs that are open, by direction and state.", "direction", "state")
WAITING_TOKENS = _gauge("pdserve_prompt_tokens_waiting", "Prompt tokens that wait to be computed.")
KV_TOKENS = _gauge("pdserve_kv_tokens", "Tokens whose KV running sequences hold.")
DIGEST_MISMATCHES = _counter("pdserve_digest_mismatches_total", "Hand-offs with a page whose digest was wrong.")
STALLED_PEERS = _gauge("pdserve_stalled_peers", "Workers that do not take the pages sent to them.")

# ---- the autoscaler
DESIRED = _gauge("pdserve_desired_replicas", "Replicas that a pool should have, for HPA or KEDA to follow.", "pool")
REPLICAS = _gauge("pdserve_replicas", "Replicas that a pool has.", "pool", "state")
DECISIONS = _counter(
    "pdserve_scaling_decisions_total", "Decisions about a pool, by action and reason.", "pool", "action", "reason"
)
LEADS = _gauge("pdserve_autoscaler_leads", "Whether this autoscaler is the leader, 0 or 1.")
REPORTED_ENDS = _counter("pdserve_reported_ends_total", "Processes of pods whose end was reported to routers.")
UNPROVED_ENDS = _gauge(
    "pdserve_unproved_ends", "Processes of removed pods whose end nothing proves, because their nodes do not answer."
)

TLS_CONNECTIONS = _counter(
    "pdserve_tls_connections_total",
    "Connections to a gRPC port with TLS, each counted as its handshake begins.",
    "port",
)
TLS_CONNECTIONS_CALLED = _counter(
    "pdserve_tls_connections_called_total",
    "Those of these connections that made a call. The others were refused, sent nothing, or are in a handshake now.",
    "port",
)
CERTIFICATE_END = _gauge(
    "pdserve_certificate_not_after_timestamp_seconds",
    "Unix time at which the process's certificate expires; changed files count once they are in use.",
    "certificate",
)


class Distribution:
    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.bounds
        self._counts = [0] * (len(metric.bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, amount)] += count
        self.total += amount * count

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values are at most each bound; bounds are texts in Prometheus' format."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


@value
class Sample:
    metric: Metric
    amount: float | Distribution
    labels: tuple[str, ...] = ()


def span_samples(counts: Mapping[str, int]) -> Iterator[Sample]:
    """Yield how many spans of a process were sent, failed or dropped."""
    return (Sample(SPANS, counts.get(result, 0), (result,)) for result in SPAN_RESULTS)


def connection_samples(ports: "Mapping[str, Connections]") -> Iterator[Sample]:
    """Yield how many connections each port with TLS has had, and how many of them made a call."""
    yield from (Sample(TLS_CONNECTIONS, counted.num_opened, (port,)) for port, counted in ports.items())
    yield from (Sample(TLS_CONNECTIONS_CALLED, counted.num_called, (port,)) for port, counted in ports.items())


def families(samples: Iterable[Sample]) -> Iterator[Family]:
    """Yield samples as Prometheus' library wants them. Samples of one metric must be adjacent."""
    for metric, group in groupby(samples, key=attrgetter("metric")):
        family = _FAMILIES[metric.kind](metric.name, metric.meaning, labels=metric.labels)
        for sample in group:
            amount, is_distribution = sample.amount, isinstance(sample.amount, Distribution)
            if is_distribution is not (metric.kind is Kind.HISTOGRAM):
                raise TypeError(f"{metric.name}: a {type(amount).__name__} is no {metric.kind}")
            counted = (amount.buckets(), amount.total) if isinstance(amount, Distribution) else (amount,)
            family.add_metric(sample.labels, *counted)
        yield family

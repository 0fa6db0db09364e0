"""Which metrics each kind of process shows."""

from collections.abc import Mapping

from pdserve.observe import metrics as m
from pdserve.observe.metrics import Metric

_RESPONSES = (m.RESPONSES_IN_BACKGROUND, m.RESPONSES_FORGOTTEN)
_SHARED = (m.WAITING, m.RUNNING, m.KV_USAGE, m.REFUSED_MESSAGES, m.SPANS)
SHOWN: Mapping[str, tuple[Metric, ...]] = {
    "router": (
        *(m.TTFT, m.TPOT, m.E2E, m.QUEUE, m.PREFILL, m.DECODE, m.INFERENCE, m.PROMPT_TOKENS),
        *(m.ANSWER_TOKENS, m.POOLED),
        *(m.FINISHED, m.CACHE_QUERIES, m.CACHE_HITS, m.HANDOFF_S, m.HANDOFF_BYTES, m.OUTCOME_RATIO, m.ARRIVED),
        *(m.ENDED, m.INVALID, m.REFUSED, m.DENIED, m.REFUSED_KEY_FILES, m.FRONTENDS, m.FRONTENDS_LOST),
        *(m.ACTIVE, m.HELD, m.GOODPUT, m.JUDGED, m.ATTAINMENT, m.REPLACED, m.MOVES, m.WORKERS, *_RESPONSES),
        *(m.CONVERSATIONS, m.CONVERSATIONS_FORGOTTEN, m.TURNS, m.PREPARED),
        *_SHARED,
    ),
    "worker": (
        *(m.ITL, m.STEP_TOKENS, m.COMPUTED_TOKENS, m.SAMPLED_TOKENS, m.DRAFTS, m.DRAFT_TOKENS),
        *(m.ACCEPTED_TOKENS, m.ACCEPTED_PER_POS, m.DRAFT_SECONDS, m.DRAFT_FAILURES, m.EXPERT_RATIO, m.PREEMPTIONS),
        *(
            m.CACHE_CONFIG,
            m.ROLE,
            m.DRAINING,
            m.PAGES,
            m.LEAKED,
            m.HANDOFFS,
            m.WAITING_TOKENS,
            m.KV_TOKENS,
            m.DIGEST_MISMATCHES,
        ),
        *(m.STALLED_PEERS, *_SHARED),
    ),
    "frontend": (m.REQUESTS_WITHOUT_ROUTER, m.REQUESTS_RESUMED, *_RESPONSES),
    "autoscaler": (m.DESIRED, m.REPLICAS, m.DECISIONS, m.LEADS),
    "watcher": (m.REPORTED_ENDS, m.UNPROVED_ENDS),  # an autoscaler on Kubernetes has one
    "any": (m.TLS_CONNECTIONS, m.TLS_CONNECTIONS_CALLED, m.CERTIFICATE_END),  # that has certificates
}

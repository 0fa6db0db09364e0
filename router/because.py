"""Why a request waits or is refused: what binds, and the figures. Pure values."""

from enum import StrEnum

from pdserve.values import value


class Cause(StrEnum):
    """What binds a request."""

    QUEUE = "queue"  # prompts that are computed before it
    PREFILL = "prefill"  # computing its own prompt
    FETCH = "fetch"  # pages of its prompt that another worker holds
    HANDOFF = "handoff"  # moving its KV to the decode worker
    BATCH = "batch"  # the sequences that decode beside it
    PROMPTS = "prompts"  # that its decode worker computes
    PAGES = "pages"  # none are free on a decode worker
    ROWS = "rows"  # of a decode worker's batch: none is free
    RESERVED = "reserved"  # decode workers leave the time that is left to hand-offs
    IDLE_CLUSTER = "idle_cluster"  # even that cannot meet the objective
    NO_PREFILL = "no_prefill"  # no prefill worker is ready
    NO_DECODE = "no_decode"  # no decode worker is ready
    NO_PAIR = "no_pair"  # workers are ready, and no two of them can hand KV over
    SLOTS = "slots"  # as many requests are placed as may be
    TURN = "turn"  # others wait before it
    TENANT_REQUESTS = "tenant_requests"  # its tenant sends more requests than it may
    TENANT_TOKENS = "tenant_tokens"  # its tenant uses more tokens than it may
    TENANT_CONCURRENCY = "tenant_concurrency"  # as many of its tenant's requests are under way as may be


_IN_WORDS = {
    Cause.QUEUE: "prompts before it",
    Cause.PREFILL: "computing its prompt",
    Cause.FETCH: "fetching pages of its prompt",
    Cause.HANDOFF: "its hand-off",
    Cause.BATCH: "the sequences that decode there",
    Cause.PROMPTS: "the prompts that are computed there",
}


@value
class Because:
    """A cause, and the same in words for whoever asked, with the figures where an objective is missed."""

    cause: Cause
    text: str

    def __str__(self) -> str:
        return self.text


def late(cause: Cause, predicted_s: float, objective_s: float) -> Because:
    text = (
        f"slo.ttft_ms: the first token would come after {predicted_s * 1e3:.0f} ms, {objective_s * 1e3:.0f} were asked "
        f"for; what takes longest: {_IN_WORDS[cause]}"
    )
    return Because(cause, text)


def slow(cause: Cause, predicted_s: float, objective_s: float) -> Because:
    text = (
        f"slo.tpot_ms: no decode worker keeps {objective_s * 1e3:.0f} ms a token now, {predicted_s * 1e3:.0f} would be "
        f"the least; what takes longest: {_IN_WORDS[cause]}"
    )
    return Because(cause, text)


def impossible(name: str, idle_s: float, objective_s: float) -> Because:
    asked_ms, idle_ms = objective_s * 1e3, idle_s * 1e3
    text = f"slo.{name}_ms: {asked_ms:.0f} ms cannot be met here: an idle cluster would need {idle_ms:.0f} ms"
    return Because(Cause.IDLE_CLUSTER, text)


def no_room(cause: Cause, num_tokens: int) -> Because:
    """Return why no decode worker can take a sequence in: for want of pages, or of rows in its batch."""
    lacking = "free pages are too few" if cause is Cause.PAGES else "its batch is full"
    return Because(cause, f"no decode worker has room for {num_tokens} tokens and their answer now: {lacking}")


def reserved(limit_s: float, objective_s: float, handed_over_s: float | None) -> Because:
    """Return why decode workers do not compute a prompt; `handed_over_s`: when a hand-off, too late, would bring it."""
    late_text = ""
    if handed_over_s is not None:
        late_text = f", by which the first token would come after {handed_over_s * 1e3:.0f} ms"
    text = (
        f"slo.tpot_ms: decode workers compute prompts only while they keep {limit_s * 1e3:.0f} ms a token, of "
        f"{objective_s * 1e3:.0f} asked for, and leave the rest to hand-offs{late_text}"
    )
    return Because(Cause.RESERVED, text)

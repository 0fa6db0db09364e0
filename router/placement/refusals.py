"""What a client is told of an objective that cannot be kept, with the figures. Pure values."""

from pdserve.protocol.refusal import Cause, Refused

_IN_WORDS = {
    Cause.QUEUE: "prompts before it",
    Cause.PREFILL: "computing its prompt",
    Cause.FETCH: "fetching pages of its prompt",
    Cause.HANDOFF: "its hand-off",
    Cause.BATCH: "the sequences that decode there",
    Cause.PROMPTS: "the prompts that are computed there",
}


def late(cause: Cause, predicted_s: float, objective_s: float) -> Refused:
    text = (
        f"slo.ttft_ms: the first token would come after {predicted_s * 1e3:.0f} ms, {objective_s * 1e3:.0f} were asked "
        f"for; what takes longest: {_IN_WORDS[cause]}"
    )
    return Refused(cause, text)


def slow(cause: Cause, predicted_s: float, objective_s: float) -> Refused:
    text = (
        f"slo.tpot_ms: no decode worker keeps {objective_s * 1e3:.0f} ms a token now, {predicted_s * 1e3:.0f} would be "
        f"the least; what takes longest: {_IN_WORDS[cause]}"
    )
    return Refused(cause, text)


def impossible(name: str, idle_s: float, objective_s: float, ttft_s: float) -> Refused:
    """`ttft_s`: of an idle cluster."""
    asked_ms, idle_ms = objective_s * 1e3, idle_s * 1e3
    text = f"slo.{name}_ms: {asked_ms:.0f} ms cannot be met here: an idle cluster would need {idle_ms:.0f} ms"
    return Refused(Cause.IDLE_CLUSTER, text, ttft_s)


def no_room(cause: Cause, num_tokens: int) -> Refused:
    """Return why no decode worker can take a sequence in: for want of pages, or of rows in its batch."""
    lacking = "free pages are too few" if cause is Cause.PAGES else "its batch is full"
    return Refused(cause, f"no decode worker has room for {num_tokens} tokens and their answer now: {lacking}")


def reserved(limit_s: float, objective_s: float, handed_over_s: float | None) -> Refused:
    """Return why decode workers do not compute a prompt; `handed_over_s`: when a hand-off, too late, would bring it."""
    late_text = ""
    if handed_over_s is not None:
        late_text = f", by which the first token would come after {handed_over_s * 1e3:.0f} ms"
    text = (
        f"slo.tpot_ms: decode workers compute prompts only while they keep {limit_s * 1e3:.0f} ms a token, of "
        f"{objective_s * 1e3:.0f} asked for, and leave the rest to hand-offs{late_text}"
    )
    return Refused(Cause.RESERVED, text)

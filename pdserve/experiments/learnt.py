"""A profile made of what a router has learnt from its workers' steps."""

from pdserve.errors import ConfigError
from pdserve.perfmodel.profile import Configuration, DecodeFields, LinkFields, PrefillFields, Profile
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

_LEAST_S = 1e-9  # of a token: a profile's tokens take some time
_ENOUGH_STEPS = 20
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LINK = LinkFields(bytes_per_s=2e9, latency_s=0.005)  # where hand-offs tell nothing of it


def learnt_profile(status: admin.ClusterStatus, source: str) -> Profile:
    """Return a profile of a cluster; ConfigError where its router has seen too few steps."""
    prefill = _most_seen(status, link.ROLE_PREFILL)
    decode = _most_seen(status, link.ROLE_DECODE)
    if prefill.num_prefill_steps < _ENOUGH_STEPS or decode.num_decode_steps < _ENOUGH_STEPS:
        raise ConfigError(
            f"profile: the router has seen {prefill.num_prefill_steps} prefill and {decode.num_decode_steps} decode "
            f"steps; {_ENOUGH_STEPS} of each are needed"
        )
    workers = [worker.registration for worker in status.workers if worker.registration.ready]
    layout = workers[0].layout
    token_bytes = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * _DTYPE_BYTES[layout.dtype]
    return Profile(
        model=status.model,
        device=" + ".join(dict.fromkeys(filter(None, (prefill.device, decode.device)))),
        source=source,
        kv_bytes_per_token=token_bytes,
        link=_LINK,
        configurations=[
            Configuration(
                tp=1,
                kv_tokens=min(worker.num_pages * worker.layout.page_size for worker in workers),
                prefill=PrefillFields(
                    step_s=prefill.prefill_step_s,
                    token_s=max(_LEAST_S, prefill.prefill_token_s),
                    token_context_s=prefill.prefill_work_s,
                ),
                decode=_decode(decode),
                prefill_slowdown=prefill.prefill_slowdown,
                decode_slowdown=decode.decode_slowdown,
            )
        ],
    )


def _most_seen(status: admin.ClusterStatus, role: "link.Role.ValueType") -> admin.LearntCosts:
    """Return what was learnt of the kind of a role's workers of which most steps were seen."""
    kinds = [costs for costs in status.costs if costs.role == role]
    return max(kinds, key=lambda c: c.num_prefill_steps + c.num_decode_steps, default=admin.LearntCosts(role=role))


def _decode(learnt: admin.LearntCosts) -> list[DecodeFields]:
    """Return decode costs by size of batch; the largest size seen holds for all beyond."""
    known = [batches for batches in learnt.decode_batches if batches.num_steps >= _ENOUGH_STEPS]
    if not known:
        costs = (learnt.decode_step_s, learnt.decode_sequence_s, learnt.decode_kv_token_s)
        return [_fields(None, *costs)]
    sizes = [batches.max_sequences for batches in known[:-1]]
    return [
        _fields(size, batches.step_s, batches.sequence_s, batches.kv_token_s)
        for size, batches in zip([*sizes, None], known, strict=True)
    ]


def _fields(max_sequences: int | None, step_s: float, sequence_s: float, kv_token_s: float) -> DecodeFields:
    return DecodeFields(max_sequences=max_sequences, step_s=step_s, sequence_s=sequence_s, kv_token_s=kv_token_s)

"""A profile of what steps cost, made of what a router has learnt from its workers.

`sweep` teaches a router: it sends requests of many lengths, alone and in batches of many sizes.
"""

import random

from pdserve.base.errors import ConfigError
from pdserve.launch.folder import ClusterState
from pdserve.measure.live import LiveCluster, Report, connected
from pdserve.measure.workload import Arrival
from pdserve.perfmodel.curve import ENOUGH_STEPS
from pdserve.perfmodel.profile import Configuration, DecodeFields, LinkFields, PrefillFields, Profile, WindowFields
from pdserve.perfmodel.wire import decode_pieces, most_seen, prefill_curve
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import layout_from_proto

_LEAST_S = 1e-9  # a profile's token_s has to be over 0
_LINK = LinkFields(bytes_per_s=2e9, latency_s=0.005)  # where nothing is known of hand-offs
_PROMPT = (8, 1024)  # shortest and longest of a sweep
_BATCH = (1, 24)
_STEPS = (8, 24)  # that each decodes


def bursts(count: int, max_length: int, seed: int) -> list[list[Arrival]]:
    """Return bursts of equal requests, with lengths and sizes spread evenly over their logarithms."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> int:
        return round(low * float((high / low) ** rng.random()))

    found = []
    for number in range(count):
        size = 1 if number % 3 == 0 else between(*_BATCH)
        outputs = 1 if number % 4 == 0 else between(*_STEPS)
        longest = min(_PROMPT[1], max(_PROMPT[0], max_length - outputs))
        prompt = between(_PROMPT[0], max(_PROMPT[0], longest / size**0.5))
        found.append([Arrival(0.0, prompt, outputs)] * size)
    return found


async def sweep(cluster: LiveCluster, sent: list[list[Arrival]], report: Report) -> None:
    """Send the bursts, each when the one before has ended. In every fourth, a prompt comes while the others decode."""
    for number, burst in enumerate(sent):
        if number % 20 == 0:
            report(f"burst {number} of {len(sent)}")
        late = [Arrival(0.1, sent[number - 1][0].prompt_tokens, 1)] if number % 4 == 3 else []
        await cluster.run(burst + late, seed=number)


async def measure_profile(state: ClusterState, sent: list[list[Arrival]], source: str, report: Report) -> Profile:
    """Sweep the workers of a cluster that runs; return what their steps cost."""
    async with connected(state) as cluster:
        await sweep(cluster, sent, report)
        return learnt_profile(await cluster.status(), source)


def learnt_profile(status: admin.ClusterStatus, source: str) -> Profile:
    """Return a profile of a cluster; ConfigError where its router has seen too few steps."""
    prefill = most_seen(status.costs, link.ROLE_PREFILL)
    decode = most_seen(status.costs, link.ROLE_DECODE)
    if prefill.num_prefill_steps < ENOUGH_STEPS or decode.num_decode_steps < ENOUGH_STEPS:
        raise ConfigError(
            f"profile: the router has seen {prefill.num_prefill_steps} prefill and {decode.num_decode_steps} decode "
            f"steps; {ENOUGH_STEPS} of each are needed"
        )
    workers = [worker.registration for worker in status.workers if worker.registration.ready]
    curve, layout = prefill_curve(prefill), layout_from_proto(workers[0].layout)
    return Profile(
        model=status.model,
        device=" + ".join(dict.fromkeys(filter(None, (prefill.device, decode.device)))),
        source=source,
        kv_bytes_per_token=layout.token_bytes,
        window=_window(layout),
        link=_LINK,
        configurations=[
            Configuration(
                tp=1,
                kv_tokens=min(layout.paging.whole_tokens(worker.num_pages) for worker in workers),
                prefill=PrefillFields(
                    step_s=curve.step_s,
                    token_s=max(_LEAST_S, curve.each_s),
                    token_context_s=curve.context_s,
                ),
                decode=[
                    DecodeFields(
                        max_sequences=piece.max_sequences,
                        step_s=piece.curve.step_s,
                        sequence_s=piece.curve.each_s,
                        kv_token_s=piece.curve.context_s,
                    )
                    for piece in decode_pieces(decode)
                ],
            )
        ],
    )


def _window(layout: KvLayout) -> WindowFields | None:
    """Return the window of the layers that have pages of their own, if there are any."""
    for group in layout.others:
        if group.window is not None:
            return WindowFields(tokens=group.window, ratio=layout.page_size // group.page_size)
    return None

"""How many decisions a router's core takes a second: arrivals, with all that their requests bring."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import process_time

from pdserve.base.ids import PROTOCOL_VERSION, Incarnation, WorkerId
from pdserve.base.roles import Role
from pdserve.measure.workload import request_id_of
from pdserve.perfmodel.curve import Step
from pdserve.proto.v1 import link_pb2
from pdserve.proto.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.predict import Predictor
from pdserve.router.requests.commands import Command, Place
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import LinkId, Registration, RequestArrived, StageReached, StepReported
from pdserve.router.wire import worker_events

_LAYOUT = KvLayout("w", 32, 8, 128, 64, "bfloat16")
_OUTPUT_TOKENS = 4


def _token(request_id: bytes, position: int, *, is_last: bool = False) -> link_pb2.TokenDelta:
    reason = FINISH_REASON_LENGTH if is_last else FINISH_REASON_UNSPECIFIED
    return link_pb2.TokenDelta(request_id=request_id, position=position, token_ids=[7], finish_reason=reason)


def _core(policy: str, num_prefill: int, num_decode: int, max_num_seqs: int = 256) -> RouterCore:
    """Return a core with workers that answer at once."""
    predictor = Predictor()
    limits = Limits(worker_silence_s=1e9, local_prefill=policy == "goodput")
    core = RouterCore("m", limits, POLICIES[policy](predictor), predictor)
    for number in range(num_prefill + num_decode):
        role = Role.PREFILL if number < num_prefill else Role.DECODE
        name = WorkerId(f"{role.value}{number}")
        link = LinkId(number + 1)
        process = link, name, Incarnation(link), role
        core.handle(
            Registration(*process, PROTOCOL_VERSION, True, "m", _LAYOUT, 10_000, max_num_seqs, 100_000, name, 2048), 0.0
        )
    return core


def _measure(core: RouterCore, num_requests: int, prompt_tokens: int) -> tuple[float, float]:
    """Return placements per second of one core's time, and seconds of the rest of a request's life."""
    placing_s = living_s = now_s = 0.0
    for number in range(num_requests):
        now_s += 0.001
        event = _arrival(number, prompt_tokens, now_s)
        start_s = process_time()
        commands = core.handle(event, now_s)
        placed_s = process_time()
        for report in _life(commands):
            core.handle(report, now_s)
        placing_s += placed_s - start_s
        living_s += process_time() - placed_s
    core.check_idle()
    return num_requests / placing_s, living_s / num_requests


def _arrival(number: int, prompt_tokens: int, now_s: float, output_tokens: int = _OUTPUT_TOKENS) -> RequestArrived:
    return RequestArrived(
        request_id=request_id_of(number),
        token_ids=[number] * prompt_tokens,
        params=SamplingParams(max_tokens=output_tokens),
        received_s=now_s,
        deadline_s=now_s + 60,
        ttft_slo_s=1.0,
        tpot_slo_s=0.1,
    )


def _life(commands: list[Command]) -> Iterator[StageReached | StepReported]:
    """Yield what workers would report of a request that was placed."""
    for place in commands:
        if not isinstance(place, Place) or place.decode is None:
            continue
        request_id, attempt = place.spec.request_id, place.spec.attempt
        first = place.prefill or place.decode
        yield StageReached(first.link, request_id, attempt, Stage.PREFILL_STARTED, 0.0)
        prompt = Step(len(place.spec.token_ids), len(place.spec.token_ids) ** 2)
        yield StepReported(first.link, [_token(request_id, 0)], prompt, 0.05)
        yield StageReached(place.decode.link, request_id, attempt, Stage.COMMITTED, 0.0)
        for position in range(1, _OUTPUT_TOKENS):
            token = _token(request_id, position, is_last=position == _OUTPUT_TOKENS - 1)
            yield StepReported(place.decode.link, [token], Step(sequences=1, kv_tokens=500), 0.01)


@dataclass(frozen=True, slots=True)
class PolicySpeed:
    name: str
    placements_per_s: float
    rest_s: float  # of a request's life


@dataclass(frozen=True, slots=True)
class StepSpeed:
    wire_s: float  # to make events of the link's bytes
    core_s: float  # to handle them


def measure_steps(num_sequences: int, num_steps: int) -> StepSpeed:
    """Measure reports of a decode step, a token a sequence, from the link's bytes on."""
    core = _core("least_loaded", 1, 1, num_sequences)
    places = [core.handle(_arrival(number, 200, 0.0, num_steps + 1), 0.0) for number in range(num_sequences)]
    specs = [command.spec for commands in places for command in commands if isinstance(command, Place)]
    wire_s = core_s = 0.0
    for position in range(num_steps + 1):
        report = link_pb2.StepReport(costs=[link_pb2.StepCost(decode_sequences=num_sequences, elapsed_us=20_000)])
        for spec in specs:
            report.deltas.append(_token(spec.request_id, position))
        packed, link_id = link_pb2.AttachRequest(step=report).SerializeToString(), LinkId(1 if position == 0 else 2)
        start_s = process_time()
        events = worker_events(link_id, link_pb2.AttachRequest.FromString(packed))
        read_s = process_time()
        for event in events:
            core.handle(event, 0.02 * position)
        if position:
            wire_s, core_s = wire_s + read_s - start_s, core_s + process_time() - read_s
    core.check_idle()
    return StepSpeed(wire_s / num_steps, core_s / num_steps)


def measure_policies(num_prefill: int, num_decode: int, num_requests: int, prompt_tokens: int) -> list[PolicySpeed]:
    cores = {policy: _core(policy, num_prefill, num_decode) for policy in POLICIES}
    return [PolicySpeed(policy, *_measure(core, num_requests, prompt_tokens)) for policy, core in cores.items()]

"""Workers that compute nothing: they attach to a router over the real link and stream known tokens in equal steps."""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias

import grpc

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import PROTOCOL_VERSION, AttemptKey
from pdserve.engine.sequence import Finish
from pdserve.net.rpc import INTERNAL_MESSAGE_BYTES, channel_options, identify, read_secret
from pdserve.perfmodel.curve import Step
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceStub
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import key_from_proto, layout_to_proto
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SampledToken
from pdserve.protocol.token_ids import TOKEN_ID_BYTES
from pdserve.worker.link import ATTACH
from pdserve.worker.messages import Progress, RouterRef, StepCost, Tokens
from pdserve.worker.reporting import StepReports

BEAT_S = 0.5
NUM_PAGES, PAGE_SIZE = 100_000, 64
MAX_MODEL_LEN = 32_768
_LAYOUT = KvLayout("replayed", 32, 8, 128, PAGE_SIZE, "bfloat16")

_ROUTER = RouterRef(0)
_Report: TypeAlias = "Tokens | Progress"
_Call: TypeAlias = "grpc.aio.StreamStreamCall[link.AttachRequest, link.AttachResponse]"


class _Sequence:
    def __init__(self, spec: link.SequenceSpec, index: int) -> None:
        self.key = key_from_proto(spec)
        self.index = index
        self.position = len(spec.token_ids) // TOKEN_ID_BYTES - spec.num_prompt_tokens
        self.max_tokens = spec.sampling.max_tokens
        self.num_again = 0  # tokens that the decode worker repeats: the prefill worker's report of them may come later


class Replayed:
    """A prefill and a decode worker, which share what they know."""

    def __init__(self, model: str, token_ids: Sequence[int], max_num_seqs: int) -> None:
        """`token_ids`: what every answer consists of, over and over."""
        self._model = model
        self._token_ids = token_ids
        self._max_num_seqs = max_num_seqs
        self._expected: dict[AttemptKey, link.SequenceSpec] = {}  # by the decode worker
        self._prompts: list[link.Place] = []  # computed with the next step
        self._running: dict[tuple[AttemptKey, int], _Sequence] = {}
        self._joined: list[AttemptKey] = []  # landed since the last step

    async def serve(self, address: str, secret_file: Path, step_s: float) -> None:
        """Attach both workers to a router and stream until cancelled."""
        secret, options = read_secret(secret_file), channel_options(INTERNAL_MESSAGE_BYTES)
        calls: list[_Call] = []
        async with grpc.aio.insecure_channel(address, options=options) as channel, asyncio.TaskGroup() as tasks:
            for role, name in ((link.ROLE_PREFILL, "p0"), (link.ROLE_DECODE, "d0")):
                proof = await identify(channel, secret, ATTACH, wait_for_ready=True)
                call = LinkServiceStub(channel).Attach(metadata=proof)
                await call.write(link.AttachRequest(register=self._registration(role, name)))
                tasks.create_task(self._read(call))
                calls.append(call)
            await self._step(calls[0], calls[1], step_s)

    def _registration(self, role: link.Role.ValueType, name: str) -> link.Register:
        return link.Register(
            worker_id=name,
            incarnation=new_incarnation(),
            role=role,
            protocol_version=PROTOCOL_VERSION,
            ready=True,
            model=self._model,
            layout=layout_to_proto(_LAYOUT),
            num_pages=NUM_PAGES,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            handoff_address=f"127.0.0.1:{role}",
        )

    async def _read(self, call: _Call) -> None:
        async for first in call:
            for message in (first, *first.more):
                self._take(message)

    def _take(self, message: link.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "place" if message.place.HasField("source"):
                spec = message.place.spec
                self._expected[key_from_proto(spec)] = spec
            case "place":
                self._prompts.append(message.place)
            case "cancel":
                self._cancel(message.cancel)
            case _:
                pass  # nothing is computed here

    def _cancel(self, cancel: link.Cancel) -> None:
        key = key_from_proto(cancel)
        if not cancel.indices:
            self._expected.pop(key, None)
            self._prompts = [place for place in self._prompts if key_from_proto(place.spec) != key]
        for each in [each for each in self._running if each[0] == key]:
            if not cancel.indices or each[1] in cancel.indices:
                del self._running[each]

    async def _step(self, prefill: _Call, decode: _Call, step_s: float) -> None:
        """Report steps as workers do."""
        loop = asyncio.get_running_loop()
        began_s = next_beat_s = loop.time()
        to_report = {call: StepReports(each_at_once=False) for call in (prefill, decode)}
        for number in count(1):
            await asyncio.sleep(max(0.0, began_s + number * step_s - loop.time()))
            if loop.time() >= next_beat_s:
                next_beat_s = loop.time() + BEAT_S
                for call in to_report:
                    await call.write(link.AttachRequest(heartbeat=link.Heartbeat(pages_free=NUM_PAGES)))
            now_s = loop.time()
            for call, (computed, reports) in ((prefill, self._prefill_step(now_s)), (decode, self._decode_step(now_s))):
                held = to_report[call]
                message = held.report(reports, StepCost(computed, step_s, now_s), now_s) if reports else None
                if message is None and held.due_s <= now_s:
                    message = held.rest(now_s)
                if message is not None:
                    await call.write(message)

    def _prefill_step(self, now_s: float) -> tuple[Step, list[_Report]]:
        reports: list[_Report] = []
        num_tokens = work = 0
        waiting = []
        for place in self._prompts:
            spec = place.spec
            key = key_from_proto(spec)
            expected = self._expected.pop(key, None)
            if place.HasField("target") and expected is None:
                waiting.append(place)  # its message to the decode worker has not come yet
                continue
            num_prompt_tokens = len(spec.token_ids) // TOKEN_ID_BYTES
            num_tokens += num_prompt_tokens
            work += num_prompt_tokens**2
            reports += _stages(key, now_s, Stage.PREFILL_STARTED, Stage.PREFILL_DONE)
            for index in spec.indices or range(spec.sampling.n):
                sequence = _Sequence(spec, index)
                if self._add_token(reports, sequence) and expected is not None:
                    self._running[key, index] = sequence
                    sequence.num_again = 1
            if expected is not None:
                self._joined.append(key)
        self._prompts = waiting
        return Step(num_tokens, work), reports

    def _decode_step(self, now_s: float) -> tuple[Step, list[_Report]]:
        computed = Step(sequences=len(self._running), kv_tokens=100 * len(self._running))
        reports: list[_Report] = []
        for key in self._joined:
            reports += _stages(key, now_s, Stage.LANDED, Stage.COMMITTED, Stage.DECODE_JOINED)
        self._joined.clear()
        for name, sequence in list(self._running.items()):
            if not self._add_token(reports, sequence):
                del self._running[name]
        return computed, reports

    def _add_token(self, reports: list[_Report], sequence: _Sequence) -> bool:
        """Add a sequence's next token; return whether it goes on."""
        begin, end = sequence.position - sequence.num_again, sequence.position + 1
        sequence.position, sequence.num_again = end, 0
        goes_on = end < sequence.max_tokens
        for position in range(begin, end):
            token = SampledToken(self._token_ids[position % len(self._token_ids)])
            finish = None if goes_on or position + 1 < end else Finish.LENGTH
            reports.append(Tokens(_ROUTER, sequence.key, sequence.index, position, (token,), finish))
        return goes_on


def _stages(key: AttemptKey, at_s: float, *stages: Stage) -> list[Progress]:
    return [Progress(_ROUTER, key, stage, at_s) for stage in stages]


def replay(
    address: str, secret_file: Path, model: str, token_ids: Sequence[int], step_s: float, max_num_seqs: int
) -> None:
    """Run replayed workers in this process until it is ended."""
    asyncio.run(Replayed(model, token_ids, max_num_seqs).serve(address, secret_file, step_s))

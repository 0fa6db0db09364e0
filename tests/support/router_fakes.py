"""A router's surroundings for tests: clients, and workers that speak the real protocol but compute nothing.

A fake worker's token is a hash of prompt, continuation and position, so that a token from the wrong place shows.
"""

import asyncio
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.checkpoint.checkpoint import NO_DEFAULTS, GenerationDefaults
from pdserve.net.rpc import INTERNAL_MESSAGE_BYTES, Metadata, channel_options, identify, read_secret
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.proto.v1.link_pb2_grpc import LinkServiceStub
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import layout_to_proto
from pdserve.protocol.token_ids import from_wire
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.served import ServedModel
from pdserve.router.server import Addresses, run
from pdserve.text.chat import ChatTemplate
from pdserve.text.infilling import Infilling
from pdserve.text.scoring import TEMPLATE as SCORED
from pdserve.text.scoring import Scoring
from pdserve.text.tokenizer import Tokenizer

MODEL = "tiny"
LAYOUT = KvLayout("w", 1, 1, 8, 16, "float32")
HEARTBEAT_S = 0.1
PATIENCE_S = 20.0  # with what takes some milliseconds on an idle machine
STREAM_OVER = (grpc.RpcError, asyncio.InvalidStateError)  # what reading and writing raise once it is
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SAMPLING_FIELDS = frozenset(inference.SamplingParams.DESCRIPTOR.fields_by_name)
GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[inference.GenerateRequest, inference.GenerateResponse]"
FILLED_IN = "<{}|{}>"  # a prompt with a suffix
_INFILLING = FILLED_IN.format("{{ messages[0].content }}", "{{ messages[1].content }}")
Key = tuple[bytes, int]  # request id, attempt


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()


def model_folder(parent: Path) -> Path:
    """Write a model's folder, with all of it that routers read: no weights."""
    folder = parent / "model"
    folder.mkdir()
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, **shape}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": TOKENIZER.vocab_size}))
    (folder / "tokenizer.json").write_text(TOKENIZER.to_json())
    return folder


LETTERS = tuple(TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz", add_special=False))


def token_of(prompt: Sequence[int], index: int, position: int) -> int:
    """Return what the fake model draws: a letter."""
    digest = hashlib.sha256(f"{list(prompt)} {index} {position}".encode()).digest()
    return LETTERS[digest[0] % len(LETTERS)]


def tokens_of(prompt: Sequence[int], num_tokens: int, index: int = 0) -> list[int]:
    return [token_of(prompt, index, position) for position in range(num_tokens)]


def vector_of(prompt: Sequence[int]) -> bytes:
    """Return what the fake model makes of a prompt: its length, its first and its last token, and 1."""
    return struct.pack("<4f", len(prompt), prompt[0], prompt[-1], 1.0)


def logits_of(prompt: Sequence[int]) -> tuple[float, float]:
    """Return the fake model's logits of yes and no: a longer prompt is a better one."""
    return len(prompt) / 64, 5.0


class FakeWorker:
    """Attaches to a router, records what it is told, and answers as a worker would."""

    def __init__(self, channel: grpc.aio.Channel, proof: Metadata, registration: link.Register) -> None:
        self.registration = registration
        self.name = registration.worker_id
        self.specs: dict[Key, link.SequenceSpec] = {}  # placements it works on
        self.prefills: list[link.Place] = []
        self.decodes: list[link.Place] = []  # hand-offs that it is to expect
        self.cancels: list[link.Cancel] = []
        self.moves: list[link.Move] = []
        self.gone: list[link.ProcessGone] = []
        self.roles: list[link.SetRole] = []  # that it was to take
        self.peers: dict[str, FakeWorker] = {}
        self.is_paused = False  # takes commands, computes nothing
        self.max_step = 10_000  # tokens after the first at which it pauses, per placement
        self.is_welcome = False
        self.is_asked_to_drain = False
        self._beats = True
        self.logprobs_per_token = 0
        self.news = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._call = LinkServiceStub(channel).Attach(metadata=proof)
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self) -> None:
        self.listen()
        await self.say(register=self.registration)
        await self.until(lambda: self.is_welcome)
        self._start(self._beat())

    def listen(self) -> None:
        self._start(self._read())

    def stop_heartbeat(self) -> None:
        self._beats = False  # to cancel a write would end the stream

    async def say(self, **message: object) -> None:
        async with self._writing:
            await self._call.write(link.AttachRequest(**message))  # type: ignore[arg-type]

    async def die(self) -> None:
        """End as a process does: nothing more is said or done."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what this worker was told fulfils a condition."""
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(condition)

    async def dropped(self) -> grpc.StatusCode:
        """Wait until the router ends the stream."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._call.code()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, STREAM_OVER):
            asyncio.get_running_loop().call_exception_handler({"message": f"{self.name}: {error!r}"})

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), link.AttachResponse):
            async with self.news:
                for each in (message, *message.more):
                    self._take(each)
                self.news.notify_all()

    async def _beat(self) -> None:
        while self._beats:
            beat = link.Heartbeat(pages_free=self.registration.num_pages, draining=self.is_asked_to_drain)
            await self.say(heartbeat=beat)
            await asyncio.sleep(HEARTBEAT_S)

    def _take(self, message: link.AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.is_welcome = True
            case "place":
                self.specs[_key(message.place.spec)] = message.place.spec
                if message.place.HasField("source"):
                    self.decodes.append(message.place)
                else:
                    self.prefills.append(message.place)
                    self._start(self._prefill(message.place))
            case "move":
                self.moves.append(message.move)
                self._move(message.move)
            case "cancel":
                self._cancel(message.cancel)
            case "set_role":
                self.roles.append(message.set_role)
            case "process_gone":
                self.gone.append(message.process_gone)
            case "drain":
                self.is_asked_to_drain = not message.drain.cancel

    def _cancel(self, cancel: link.Cancel) -> None:
        self.cancels.append(cancel)
        if not cancel.indices:
            for key in [k for k in self.specs if k[0] == cancel.request_id and k[1] <= cancel.attempt]:
                del self.specs[key]

    def _move(self, move: link.Move) -> None:
        """Let the target go on with a placement of one continuation."""
        target = self.peers[move.target.worker_id]
        if self.specs.pop((move.request_id, move.attempt), None) is not None:
            target._start(target._decode((move.request_id, move.new_attempt)))

    async def _prefill(self, prefill: link.Place) -> None:
        if self.is_paused:
            return
        spec, key = prefill.spec, _key(prefill.spec)
        await self.progress(key, link.STAGE_PREFILL_QUEUED)
        await self.progress(key, link.STAGE_PREFILL_STARTED, cached_tokens=1)
        await self.progress(key, link.STAGE_PREFILL_DONE)
        position = len(token_ids_of(spec)) - spec.num_prompt_tokens
        is_last = position + 1 >= spec.sampling.max_tokens
        prompts = [scored(spec)] if spec.sampling.HasField("prompt_logprobs") else []
        deltas = [self.delta(spec, index, position, is_last=is_last) for index in indices_of(spec)]
        await self.say(step=link.StepReport(prompts=prompts, deltas=deltas))
        self.specs.pop(key, None)
        decode = self.peers.get(prefill.target.worker_id)
        if not is_last and decode is not None:
            decode._start(decode._decode(key))

    async def _decode(self, key: Key) -> None:
        await self.until(lambda: key in self.specs or any(c.request_id == key[0] for c in self.cancels))
        if key not in self.specs or self.is_paused:
            return
        spec = self.specs[key]
        await self.progress(key, link.STAGE_LANDED, handoff_bytes=4096, handoff_us=1500)
        await self.progress(key, link.STAGE_COMMITTED)
        await self.progress(key, link.STAGE_DECODE_JOINED)
        first = len(token_ids_of(spec)) - spec.num_prompt_tokens
        last = min(spec.sampling.max_tokens, first + 1 + self.max_step)
        indices = list(indices_of(spec))
        for position in range(first, last):
            if key not in self.specs or not indices:
                break
            is_last = position + 1 == spec.sampling.max_tokens
            deltas = [self.delta(spec, index, position, is_last=is_last) for index in indices]
            await self.step(deltas)
            indices = [delta.index for delta in deltas if not delta.finish_reason]
        if last == spec.sampling.max_tokens or not indices:
            self.specs.pop(key, None)

    async def step(self, deltas: Sequence[link.TokenDelta]) -> None:
        await self.say(step=link.StepReport(deltas=deltas))

    async def progress(self, key: Key, stage: link.Stage.ValueType, **figures: int) -> None:
        news = link.Progress(request_id=key[0], attempt=key[1], stage=stage, **figures)  # type: ignore[arg-type]
        await self.say(step=link.StepReport(progress=[news]))

    def delta(self, spec: link.SequenceSpec, index: int, position: int, *, is_last: bool = False) -> link.TokenDelta:
        prompt = token_ids_of(spec)[: spec.num_prompt_tokens]
        if spec.sampling.HasField("pooling"):
            done, pooled = inference.FINISH_REASON_STOP, vector_of(prompt)
            if spec.sampling.pooling.kind == inference.POOLING_KIND_LOGITS:
                pooled = struct.pack("<2f", *logits_of(prompt))
            return link.TokenDelta(request_id=spec.request_id, attempt=spec.attempt, finish_reason=done, pooled=pooled)
        top = [inference.TokenLogprob(token_id=i, logprob=-1.0) for i in range(self.logprobs_per_token)]
        token, finish_reason = token_of(prompt, index, position), inference.FINISH_REASON_UNSPECIFIED
        if token in spec.sampling.stop_token_ids:
            finish_reason = inference.FINISH_REASON_STOP
        elif is_last:
            finish_reason = inference.FINISH_REASON_LENGTH
        return link.TokenDelta(
            request_id=spec.request_id,
            attempt=spec.attempt,
            index=index,
            position=position,
            token_ids=[token],
            logprobs=[inference.TokenLogprobs(chosen=-0.5, top=top)] if top else [],
            finish_reason=finish_reason,
        )


def scored(spec: link.SequenceSpec) -> link.PromptDelta:
    """Return log probabilities of a prompt: each token's is its number, with a minus."""
    count, num_top = spec.num_prompt_tokens - 1, spec.sampling.prompt_logprobs
    chosen = [-float(number) for number in range(1, count + 1)]
    return link.PromptDelta(
        request_id=spec.request_id,
        attempt=spec.attempt,
        position=1,
        chosen=struct.pack(f"<{count}f", *chosen),
        top_ids=struct.pack(f"<{count * num_top}I", *[*range(num_top)] * count),
        top=struct.pack(f"<{count * num_top}f", *[value for value in chosen for _ in range(num_top)]),
    )


def token_ids_of(spec: link.SequenceSpec) -> Sequence[int]:
    return from_wire(spec.token_ids, "token_ids")


def _key(spec: link.SequenceSpec) -> Key:
    return spec.request_id, spec.attempt


def indices_of(spec: link.SequenceSpec) -> Sequence[int]:
    return spec.indices or range(spec.sampling.n)


class RouterUnderTest:
    """A running router, its clients' stubs, and workers for it."""

    def __init__(self, addresses: Addresses, secret: bytes, stack: AsyncExitStack) -> None:
        self.addresses = addresses
        self.secret = secret
        self.stop = asyncio.Event()
        self._stack = stack
        self.workers: dict[str, FakeWorker] = {}

    async def start(self) -> None:
        self.public = await self._channel(self.addresses.public)
        self.internal = await self._channel(self.addresses.internal)
        self._worker_channel = await self._channel(self.addresses.internal)
        self.inference = InferenceServiceStub(self.public)
        self.admin = AdminServiceStub(self.internal)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address, options=channel_options(INTERNAL_MESSAGE_BYTES))
        return await self._stack.enter_async_context(channel)

    async def worker(self, role: link.Role.ValueType, name: str, **registration: object) -> FakeWorker:
        """Attach a fake worker."""
        fields: dict[str, object] = {
            "worker_id": name,
            "incarnation": new_incarnation(),
            "role": role,
            "protocol_version": PROTOCOL_VERSION,
            "ready": True,
            "model": MODEL,
            "layout": layout_to_proto(LAYOUT),
            "num_pages": 1000,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "max_model_len": 2048,
            "handoff_address": f"127.0.0.1:{len(self.workers)}",
        }
        worker = await self.unattached(link.Register(**(fields | registration)))  # type: ignore[arg-type]
        await worker.attach()
        self._stack.push_async_callback(worker.die)
        self.workers[name] = worker
        for other in self.workers.values():
            other.peers = self.workers
        return worker

    async def unattached(self, registration: link.Register) -> FakeWorker:
        """Open a worker's stream on which nothing has been said."""
        proof = await identify(self._worker_channel, self.secret, "/pdserve.v1.LinkService/Attach")
        return FakeWorker(self._worker_channel, proof, registration)

    async def proof(self, method: str) -> Metadata:
        """Return the metadata of one call of the operator's."""
        return await identify(self.internal, self.secret, f"/pdserve.v1.AdminService/{method}")

    async def pair(self) -> tuple[FakeWorker, FakeWorker]:
        """Attach one worker of each kind and wait until the router would place on them."""
        prefill = await self.worker(link.ROLE_PREFILL, "p0")
        decode = await self.worker(link.ROLE_DECODE, "d0")
        await self.until_status(lambda status: sum(not w.unroutable for w in status.workers) == 2)
        return prefill, decode

    def generate(self, *, timeout_s: float | None = 10.0, **fields: object) -> "GenerateCall":
        """Ask for text; keyword arguments are the request's fields, sampling's included."""
        sampling = {name: fields.pop(name) for name in tuple(fields) if name in SAMPLING_FIELDS}
        if sampling:
            fields["sampling"] = inference.SamplingParams(**sampling)  # type: ignore[arg-type]
        request = inference.GenerateRequest(**fields)  # type: ignore[arg-type]
        return self.inference.Generate(request, timeout=timeout_s)

    async def until_status(
        self, condition: Callable[[admin.ClusterStatus], bool], patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until the router's own account of the cluster fulfils a condition."""
        async with asyncio.timeout(patience_s):
            call = self.admin.WatchStatus(admin.WatchStatusRequest(), metadata=await self.proof("WatchStatus"))
            async for reply in call:
                if condition(reply.status):
                    call.cancel()
                    return

    async def until_idle(self) -> None:
        """Wait until nothing of any request is left: the state every test has to end in."""
        await self.until_status(
            lambda s: s.num_active == 0 and s.num_held == 0 and all(w.num_assigned == 0 for w in s.workers)
        )


async def collect(call: GenerateCall) -> list[inference.GenerateResponse]:
    """Read an answer to its end."""
    return [reply async for reply in call]


def text_of(replies: Iterable[inference.GenerateResponse], index: int = 0) -> str:
    return "".join(delta.text for reply in replies for delta in reply.deltas if delta.index == index)


def tokens_in(replies: Iterable[inference.GenerateResponse], index: int = 0) -> list[int]:
    return [t for reply in replies for delta in reply.deltas if delta.index == index for t in delta.token_ids]


async def error_of(call: GenerateCall) -> tuple[grpc.StatusCode, str]:
    """Return how a call failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), caught.value.details() or ""


StartRouter = Callable[..., Awaitable[RouterUnderTest]]


@asynccontextmanager
async def running_router(
    secret_file: Path,
    settings: dict[str, object],
    *,
    template: str | None = TEMPLATE,
    defaults: GenerationDefaults = NO_DEFAULTS,
    archived: Callable[[], bytes] | None = None,
) -> AsyncIterator[RouterUnderTest]:
    config = RouterConfig.model_validate(
        {"model": MODEL, "secret_file": secret_file, "port": 0, "internal_port": 0, **settings}
    )
    chat = None if template is None else ChatTemplate(template, {})
    model = ServedModel(
        config.served_model_name or MODEL,
        4096,
        TOKENIZER.vocab_size,
        defaults,
        TOKENIZER,
        chat,
        eos_token_ids=(0,),
        archived=archived,
        aliases=config.served_model_aliases,
        hidden_size=4,
        scoring=None if template is None else Scoring(ChatTemplate(SCORED, {}), (LETTERS[24], LETTERS[13])),
        infilling=None if template is None else Infilling(ChatTemplate(_INFILLING, {}), (LETTERS[25],)),
    )
    secret = read_secret(secret_file)
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        tasks.create_task(run(config, model if config.serve_clients else None, stop, ready.set_result))
        router = RouterUnderTest(await ready, secret, stack)
        router.stop = stop
        await router.start()
        try:
            yield router
        finally:
            await stack.aclose()
            stop.set()

"""Prepares the next turn of a conversation while its client runs a tool, or reads.

What the next turn's prompt will begin with is computed as a request of its own, which nobody reads and whose first
token ends it: a prefill worker fetches or computes those pages, and has them cached. It has the lowest priority, and an
objective: routers refuse it where it would have to wait. The next turn cancels it.

Invariant: at most MAX_UNDER_WAY turns of a process are prepared at once, each for WITHIN_S at most, MAX_OF_TENANT of a
tenant, and one of a conversation. None is rendered while a thread tokenizes another prompt, so at most one thread
renders them.
"""

import asyncio
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.base.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import RefusedError
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import TokenIds, pack
from pdserve.router.frontend.answer import Answer, Gain, Outcome, Pace
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import Visit
from pdserve.router.frontend.prompts import Prompts
from pdserve.router.requests.events import RequestArrived
from pdserve.text.stop import OutputText
from pdserve.text.tokenizer import Tokenizer

MAX_UNDER_WAY = 16
MAX_OF_TENANT = MAX_UNDER_WAY // 2
WITHIN_S = 2.0
LOWEST_PRIORITY = -(2**31)
_FOLLOW_UPS = "0", "1"  # what a user or a tool may say next: prompts agree up to there

logger = logging.getLogger(__name__)

Said = Callable[[str], inference.ChatMessage]  # makes a message of an answer's text, as clients send it back


class _Nowhere:
    """The sink of an answer that nobody reads."""

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        del gains, outcome
        return True

    def cut_off(self, outcome: object) -> None:
        del outcome


@dataclass(slots=True)
class _Preparation:
    event: RequestArrived | None = None  # once it is submitted
    is_late: bool = False  # the turn has come


class NextTurns:
    """The turns that this process prepares. Leaving the `async with` block cancels those that are left."""

    def __init__(
        self, backend: Backend, prompts: Prompts, tokenizer: Tokenizer, max_model_len: Callable[[], int]
    ) -> None:
        """`max_model_len`: of a prompt and its answer, now."""
        self._backend = backend
        self._max_model_len = max_model_len
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._running: dict[tuple[str, str], _Preparation] = {}  # by tenant and conversation
        self._tasks = asyncio.TaskGroup()
        self._pace = Pace(None, asyncio.get_running_loop(), backend.fail)
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for preparation in self._running.values():
            self._cancel(preparation)
        await self._tasks.__aexit__(kind, error, trace)

    def begin(self, request: inference.GenerateRequest, said: Said | None, visit: Visit, answer: Answer) -> None:
        """Prepare what follows an answer that is complete, if there is room for it.

        `said`: of a chat; None: clients send the text back as it is. `visit`: is charged for the answer's tokens.
        """
        key = _key_of(answer.event)
        if (
            self._is_closed
            or not self._backend.readiness().is_live
            or key in self._running
            or len(self._running) >= MAX_UNDER_WAY
        ):
            return
        if request.chat.continue_final_message:
            return  # the answer is a part of a message
        if sum([tenant == key[0] for tenant, _ in self._running]) >= MAX_OF_TENANT:
            return
        self._running[key] = _Preparation()
        work = self._prepare(key, request, said or _plainly, visit, answer)
        self._tasks.create_task(work, name="prepare the next turn")

    def give_way(self, event: RequestArrived) -> None:
        """Cancel the preparation of a turn that has come."""
        preparation = self._running.get(_key_of(event))
        if preparation is not None:
            self._cancel(preparation)

    def _cancel(self, preparation: _Preparation) -> None:
        preparation.is_late = True
        if preparation.event is not None:
            self._backend.leave(preparation.event.request_id)

    async def _prepare(
        self, key: tuple[str, str], request: inference.GenerateRequest, said: Said, visit: Visit, answer: Answer
    ) -> None:
        try:
            token_ids = await self._known(self._running[key], answer, request, said)
            if 0 < len(token_ids) < self._max_model_len() and not self._running[key].is_late:
                visit.spend(max(0, len(token_ids) - len(answer.event.token_ids)))
                await self._compute(self._running[key], answer.event, token_ids)
        except RefusedError:
            pass  # the next turn cannot be written, or is too long
        except Exception:  # what nobody waits for may not end what others wait for
            logger.exception("a next turn could not be prepared")
        finally:
            del self._running[key]

    async def _known(
        self, preparation: _Preparation, answer: Answer, request: inference.GenerateRequest, said: Said
    ) -> TokenIds:
        """Return the tokens with which the next turn will begin, as far as they are known.

        None are returned where the turn has come meanwhile, or other prompts are being tokenized.
        """
        if request.WhichOneof("prompt") != "chat":
            return pack(answer.event.token_ids) + pack(answer.kept_ids)
        room, prompts = self._max_model_len(), list[TokenIds]()
        for follow_up in _FOLLOW_UPS:
            if preparation.is_late or not self._prompts.is_idle:
                return pack(())
            following = inference.GenerateRequest(chat=request.chat)
            following.chat.add_generation_prompt = False
            message = said("".join(answer.kept_text))
            following.chat.messages.append(message)
            following.chat.messages.extend(_answers_to(message, follow_up))
            prompts.append(await self._prompts.tokenize(following, room, WITHIN_S))
        return common_start(*prompts)

    async def _compute(self, preparation: _Preparation, turn: RequestArrived, token_ids: TokenIds) -> None:
        now_s, ended = self._backend.clock.now_s(), asyncio.Event()
        event = RequestArrived(
            request_id=new_request_id(),
            token_ids=token_ids,
            params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
            received_s=now_s,
            deadline_s=now_s + WITHIN_S,
            priority=LOWEST_PRIORITY,
            tenant=turn.tenant,
            ttft_slo_s=WITHIN_S,
            adapter=turn.adapter,
            session=turn.session,
            is_preparation=True,
        )

        def note_end(prepared: Answer, outcome: Outcome) -> None:
            self._backend.outcomes.end(event, outcome, prepared.finish_reasons)
            ended.set()

        outputs, bound = [OutputText(self._tokenizer.detokenizer(at_start=False), (), 0)], 1 << 20
        computed = Answer(event, _Nowhere(), outputs=outputs, max_unsent_bytes=bound, pace=self._pace, on_end=note_end)
        preparation.event = event
        self._backend.submit(event, computed)
        await ended.wait()


def common_start(one: TokenIds, other: TokenIds) -> TokenIds:
    """Return what both begin with. Compares slices, which takes microseconds where a loop over tokens takes ms."""
    lengths = range(1, min(len(one), len(other)) + 1)
    num_common = bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])
    return one[:num_common]


def _plainly(text: str) -> inference.ChatMessage:
    return inference.ChatMessage(role="assistant", content=text)


def _key_of(event: RequestArrived) -> tuple[str, str]:
    """Return what names a conversation; of a request that names none, the request itself."""
    return event.tenant, event.session or event.request_id.hex()


def _answers_to(message: inference.ChatMessage, text: str) -> list[inference.ChatMessage]:
    """Return what may follow an assistant's message: what its tools bring, or what the user says."""
    if not message.tool_calls_json:
        return [inference.ChatMessage(role="user", content=text)]
    call: object = json.loads(message.tool_calls_json)[0].get("id", "")
    return [inference.ChatMessage(role="tool", content=text, tool_call_id=str(call))]

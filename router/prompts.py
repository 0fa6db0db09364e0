"""Turns prompts into token ids, in threads, so that a long one keeps nobody else waiting."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from pdserve.checkpoint.checkpoint import GenerationDefaults
from pdserve.errors import RequestError, Status, invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.text.chat import ChatMessage
from pdserve.text.detokenize import Detokenizer
from pdserve.token_ids import TokenIds, largest, pack

NUM_THREADS = 2
SLICE_TOKENS = 16384  # packed at once: 0.4 ms of the event loop
Encode = Callable[[inference.GenerateRequest], TokenIds]


class Tokenizer(Protocol):
    """What the router needs of a model's tokenizer."""

    def encode(self, text: str, *, add_special: bool) -> list[int]: ...
    def detokenizer(self, *, at_start: bool) -> Detokenizer: ...


class ChatTemplate(Protocol):
    def render(self, messages: Seq[ChatMessage]) -> str: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router needs of a model: everything but its weights."""

    name: str
    max_model_len: int  # by its own config
    vocab_size: int  # may be less than the tokenizer knows
    defaults: GenerationDefaults
    tokenizer: Tokenizer
    chat: ChatTemplate | None


class Prompts:
    """Tokenizes prompts of one model, a bounded number at a time."""

    def __init__(self, model: ServedModel, max_num_tokenizing: int, timeout_s: float) -> None:
        self._model = model
        self._max_num_tokenizing = max_num_tokenizing
        self._timeout_s = timeout_s
        self._num_tokenizing = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def token_ids(self, request: inference.GenerateRequest, max_model_len: int, remaining_s: float) -> TokenIds:
        """Return a request's prompt as token ids; RequestError where it has none or is of no use."""
        match request.WhichOneof("prompt"):
            case "token_ids":
                return await self._checked(request.token_ids.ids, max_model_len)
            case "text":
                if not request.text:
                    raise invalid("text", "it is empty, at least 1 character is needed")
                return await self._in_thread(request, self._encode_text, remaining_s)
            case "chat":
                if self._model.chat is None:
                    raise invalid("chat", "the model has no chat template; send text or token_ids")
                return await self._in_thread(request, self._encode_chat, remaining_s)
            case _:
                raise invalid("prompt", "none was given; exactly one of text, token_ids and chat is needed")

    async def _checked(self, ids: Seq[int], max_model_len: int) -> TokenIds:
        if not ids:
            raise invalid("token_ids", "it is empty, at least 1 id is needed")
        if len(ids) > max_model_len:
            raise invalid("token_ids", f"{len(ids)} ids are over the limit of {max_model_len} (max_model_len)")
        packed = pack(ids[:SLICE_TOKENS])
        for start in range(SLICE_TOKENS, len(ids), SLICE_TOKENS):
            await asyncio.sleep(0)  # protobuf makes an integer of each: others have their turn
            packed += pack(ids[start : start + SLICE_TOKENS])
        return self._in_vocabulary(packed, "token_ids")

    def _in_vocabulary(self, ids: TokenIds, field: str) -> TokenIds:
        """Return the ids; RequestError naming the first that the model has no embedding for."""
        if largest(ids) >= self._model.vocab_size:
            position, token_id = next((place, i) for place, i in enumerate(ids) if i >= self._model.vocab_size)
            limit = self._model.vocab_size - 1
            raise invalid(field, f"token id {token_id} at position {position} is outside [0, {limit}]")
        return ids

    def _encode_text(self, request: inference.GenerateRequest) -> TokenIds:
        return self._in_vocabulary(pack(self._model.tokenizer.encode(request.text, add_special=True)), "text")

    def _encode_chat(self, request: inference.GenerateRequest) -> TokenIds:
        messages = [ChatMessage(message.role, message.content) for message in request.chat.messages]
        assert self._model.chat is not None
        ids = self._model.tokenizer.encode(self._model.chat.render(messages), add_special=False)
        return self._in_vocabulary(pack(ids), "chat")

    async def _in_thread(self, request: inference.GenerateRequest, encode: Encode, remaining_s: float) -> TokenIds:
        limit = self._max_num_tokenizing
        if self._num_tokenizing >= limit:
            text = f"max_num_tokenizing: {limit} prompts are being tokenized already"
            raise RequestError(Status.RESOURCE_EXHAUSTED, text)
        self._num_tokenizing += 1
        work = self._threads.submit(encode, request)
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._note_done))
        try:
            async with asyncio.timeout(min(self._timeout_s, remaining_s)):
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            if remaining_s <= self._timeout_s:
                text = "the deadline passed before the prompt was tokenized"
                raise RequestError(Status.DEADLINE_EXCEEDED, text) from error
            text = f"tokenize_timeout_s: the prompt was not tokenized within {self._timeout_s} s"
            raise RequestError(Status.RESOURCE_EXHAUSTED, text) from error

    def _note_done(self) -> None:
        # Called when the thread is done, which is later than a time-out: a stuck thread keeps its place.
        self._num_tokenizing -= 1

"""Makes token ids of a request's prompt before the core knows it.

Long prompts are tokenized in threads, so that other requests need not wait. A short prompt takes less time than the
way to a thread and back. A text whose length alone says that it has too many tokens is refused without tokenizing it.
Errors name the field, its value and the limit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pdserve.base.collector import trim_memory
from pdserve.base.errors import GrammarError
from pdserve.grammar.checker import Checker
from pdserve.grammar.plain import Plain, plain
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.protocol.sampling import StructuredOutput
from pdserve.protocol.token_ids import TokenIds, largest, pack
from pdserve.router.frontend.conversations import message_of, options_of
from pdserve.router.frontend.served import ServedModel
from pdserve.router.requests.events import RequestArrived
from pdserve.text.chat import ChatTemplate

NUM_THREADS = 2
INLINE_BYTES = 2048  # of a request tokenized on the event loop, in under half a millisecond
INLINE_BAD_WORDS = 8  # of a request tokenized on the event loop; each word is tokenized twice
LONG_BYTES = 2**18  # of a request after which memory is trimmed: tokenizing takes a hundred times as much
TRIM_AFTER_S = 1.0  # once for all requests within this time
SLICE_TOKENS = 16384  # packed without a pause: 0.4 ms of the event loop
Encoded = TypeVar("Encoded")
Check = Callable[[StructuredOutput], Awaitable[Plain]]  # RefusedError for what cannot be compiled
Loosen = Callable[[Check], Awaitable[StructuredOutput | None]]


class Prompts:
    """Tokenizes prompts of one model, a bounded number at a time."""

    def __init__(
        self, model: ServedModel, max_num_tokenizing: int, timeout_s: float, *, lenient_schemas: bool = False
    ) -> None:
        self._lenient_schemas = lenient_schemas
        self._model = model
        self._max_num_tokenizing = max_num_tokenizing
        self._timeout_s = timeout_s
        self._num_tokenizing = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenize")
        self._grammars = Checker(model.tokenizer.to_json, model.eos_token_ids)

    @property
    def is_idle(self) -> bool:
        """Whether no thread tokenizes."""
        return not self._num_tokenizing

    async def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._grammars.close()

    async def tokenize(
        self,
        request: inference.GenerateRequest,
        max_model_len: int,
        remaining_s: float,
        template: ChatTemplate | None = None,
    ) -> TokenIds:
        """Return a request's prompt as token ids; RefusedError if there is no prompt, or it cannot be served.

        template: of a conversation, in place of the model's.
        """
        match request.WhichOneof("prompt"):
            case "token_ids":
                return await self._checked(request.token_ids.ids, max_model_len)
            case "text":
                if not request.text:
                    raise invalid("text", "it is empty, at least 1 character is needed")
                self._trim_later(request.ByteSize())
                self._check_length("text", request.text, max_model_len)
                return await self._encoded(request, self._encode_text, remaining_s)
            case "chat":
                if (template or self._model.chat) is None:
                    raise invalid("chat", "the model has no chat template; send text or token_ids")
                return await self._encoded(request, partial(self._encode_chat, max_model_len, template), remaining_s)
            case _:
                raise invalid("prompt", "none was given; exactly one of text, token_ids and chat is needed")

    async def _checked(self, ids: Seq[int], max_model_len: int) -> TokenIds:
        if not ids:
            raise invalid("token_ids", "it is empty, at least 1 id is needed")
        if len(ids) > max_model_len:
            raise invalid("token_ids", too_long(f"{len(ids)} ids are too many", max_model_len))
        packed = pack(ids[:SLICE_TOKENS])
        for start in range(SLICE_TOKENS, len(ids), SLICE_TOKENS):
            await asyncio.sleep(0)  # protobuf makes an integer of each id: let others run
            packed += pack(ids[start : start + SLICE_TOKENS])
        return self._in_vocabulary(packed, "token_ids")

    async def with_bad_words(
        self, event: RequestArrived, request: inference.GenerateRequest, remaining_s: float
    ) -> RequestArrived:
        """Return a request with its bad words as token ids; RefusedError if these are over a limit."""
        if not request.sampling.bad_words:
            return event
        is_short = len(request.sampling.bad_words) <= INLINE_BAD_WORDS
        words = await self._encoded(request, self._encode_bad_words, remaining_s, is_short=is_short)
        params = replace(event.params, bad_word_ids=event.params.bad_word_ids + words)
        params.validate(self._model.vocab_size)
        return replace(event, params=params)

    async def with_structured(
        self, event: RequestArrived, remaining_s: float, loosen: Loosen | None = None
    ) -> tuple[RequestArrived, tuple[str, ...]]:
        """Return a request whose answers can match its structured output, and what of its schemas is ignored.

        RefusedError if no answer can match, or that is not known in time. `loosen` returns what to take in place of a
        specification that is refused.
        """
        structured = event.params.structured_output
        if structured is None:
            return event, ()
        check = partial(self._checked_output, event.tenant)
        try:
            async with asyncio.timeout(remaining_s):
                try:
                    found = await check(structured)
                except RefusedError as error:
                    looser = None
                    if loosen is not None and error.refused.cause is Cause.INVALID:
                        looser = await loosen(check)
                    if looser is None:
                        raise
                    found = await check(looser)
        except TimeoutError as error:
            text = "the deadline passed before structured_output was compiled"
            raise RefusedError(Refused(Cause.DEADLINE, text)) from error
        return replace(event, params=replace(event.params, structured_output=found.structured)), found.ignored

    async def _checked_output(self, tenant: str, structured: StructuredOutput) -> Plain:
        """Return a specification as workers compile it; RefusedError if it cannot be compiled."""
        rewrite = partial(plain, structured, lenient=self._lenient_schemas)
        is_short = sum(map(len, structured.texts)) <= INLINE_BYTES and "oneOf" not in "".join(structured.texts)
        try:
            found = rewrite() if is_short else await asyncio.to_thread(rewrite)
        except GrammarError as error:
            raise invalid(structured.field, str(error)) from error
        await self._grammars.check(found.structured, tenant)
        return found

    def _encode_bad_words(self, request: inference.GenerateRequest) -> tuple[tuple[int, ...], ...]:
        """Return each word's tokens, with a space before it and without: an answer may have either."""
        encode, vocab_size = self._model.tokenizer.encode, self._model.vocab_size
        texts = [space + word.lstrip() for word in request.sampling.bad_words for space in ("", " ")]
        words = dict.fromkeys(tuple(encode(text, add_special=False)) for text in texts)
        return tuple(word for word in words if word and max(word) < vocab_size)  # no other token is ever sampled

    def _in_vocabulary(self, ids: TokenIds, field: str) -> TokenIds:
        """Return the ids; RefusedError names the first for which the model has no embedding."""
        if largest(ids) >= self._model.vocab_size:
            check_ids(ids, field, self._model.vocab_size)
        return ids

    def _check_length(self, field: str, text: str, max_model_len: int) -> None:
        """Raise RefusedError for a text whose length alone says that it has too many tokens."""
        num_tokens = self._model.tokenizer.fewest_tokens(text)
        if num_tokens > max_model_len:
            raise invalid(field, too_long(f"{len(text)} characters are at least {num_tokens} tokens", max_model_len))

    def _encode_text(self, request: inference.GenerateRequest) -> TokenIds:
        add_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        return self._in_vocabulary(pack(self._model.tokenizer.encode(request.text, add_special=add_special)), "text")

    def _encode_chat(
        self, max_model_len: int, template: ChatTemplate | None, request: inference.GenerateRequest
    ) -> TokenIds:
        messages, options = [message_of(message) for message in request.chat.messages], options_of(request.chat)
        model = self._model
        chat = template or (model.tool_chat or model.chat if options.tools else model.chat)
        assert chat is not None
        keep_text = None if model.allow_special_tokens_in_text else model.tokenizer.special_texts
        prompt = chat.prompt(messages, options, keep_text)
        self._check_length("chat", prompt.text, max_model_len)
        ids = prompt.encoded(model.tokenizer)
        return self._in_vocabulary(pack(ids), "chat")

    async def _encoded(
        self,
        request: inference.GenerateRequest,
        encode: Callable[[inference.GenerateRequest], Encoded],
        remaining_s: float,
        *,
        is_short: bool = True,
    ) -> Encoded:
        if is_short and request.ByteSize() <= INLINE_BYTES:
            return encode(request)
        limit = self._max_num_tokenizing
        if self._num_tokenizing >= limit:
            text = f"max_num_tokenizing: {limit} prompts are being tokenized already"
            raise RefusedError(Refused(Cause.PREPARING, text))
        self._num_tokenizing += 1
        work = self._threads.submit(encode, request)
        loop, num_bytes = asyncio.get_running_loop(), request.ByteSize()
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._note_done, num_bytes))
        try:
            async with asyncio.timeout(min(self._timeout_s, remaining_s)):
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            if remaining_s <= self._timeout_s:
                text = "the deadline passed before the prompt was tokenized"
                raise RefusedError(Refused(Cause.DEADLINE, text)) from error
            text = f"tokenize_timeout_s: the prompt was not tokenized within {self._timeout_s} s"
            raise RefusedError(Refused(Cause.PREPARING, text)) from error
        finally:
            del work  # its error refers to this frame: together they would hold the request until a full collection

    def _note_done(self, num_bytes: int) -> None:
        # Called when the thread is done, which may be after a time-out: a stuck thread counts until then.
        self._num_tokenizing -= 1
        self._trim_later(num_bytes)

    def _trim_later(self, num_bytes: int) -> None:
        """Return free memory to the system a moment after a request of so many bytes, if it was long."""
        if num_bytes >= LONG_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        self._threads.submit(trim_memory)


def check_ids(ids: Iterable[int], field: str, vocab_size: int) -> None:
    """Raise RefusedError that names the first token id which is not in the vocabulary."""
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(field, f"token id {token_id} at position {position} is outside [0, {vocab_size - 1}]")


def with_tokens(
    event: RequestArrived, request: inference.GenerateRequest, token_ids: TokenIds, max_model_len: int
) -> RequestArrived:
    """Return a request with its tokens; RefusedError if there is no room for an answer.

    If the client did not set max_tokens, or said that the answer may be shorter, it is cut to the room.
    """
    params, num_prompt_tokens = event.params, len(token_ids)
    sampling, room = request.sampling, max_model_len - num_prompt_tokens
    may_be_shorter = sampling.fill_model_len or not sampling.HasField("max_tokens")
    if num_prompt_tokens == 0:
        raise invalid("prompt", "it has no tokens, at least 1 is needed")
    if may_be_shorter and room < 1:
        problem = f"it alone has {num_prompt_tokens} tokens, which leaves no room for an answer"
        if params.pooling is not None:
            problem = f"it has {num_prompt_tokens} tokens, over the limit of {max_model_len - 1} for a vector"
        raise invalid("prompt", too_long(problem, max_model_len))
    name, num_tokens = ("min_tokens", params.min_tokens) if may_be_shorter else ("max_tokens", params.max_tokens)
    if num_tokens > room:
        total = num_prompt_tokens + num_tokens
        problem = f"{num_prompt_tokens} prompt tokens and {name} {num_tokens} are {total} together"
        raise invalid(name, too_long(problem, max_model_len))
    if params.max_tokens > room:
        params = replace(params, max_tokens=room)
    return replace(event, token_ids=token_ids, params=params)


def too_long(problem: str, max_model_len: int) -> str:
    """Return a problem with the words by which OpenAI's clients know that a prompt has to be shortened."""
    return f"{problem}; this model's maximum context length is {max_model_len} tokens (max_model_len)"

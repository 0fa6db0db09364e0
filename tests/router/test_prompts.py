"""Prompts are ids that tokenizer and model both know, whichever of them has the smaller vocabulary."""

from dataclasses import replace
from pathlib import Path
from threading import current_thread

import pytest
from router_fakes import TEMPLATE, TOKENIZER, StartRouter, collect, model_folder
from small_vocabulary import END, small_tokenizer

from pdserve.checkpoint.checkpoint import NO_DEFAULTS
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import RefusedError, Status
from pdserve.protocol.token_ids import TokenIds
from pdserve.router.config import RouterConfig
from pdserve.router.frontend import endpoints
from pdserve.router.frontend.prompts import Loosen, Prompts
from pdserve.router.frontend.served import ServedModel, load_model
from pdserve.router.frontend.terms import check_terms
from pdserve.router.requests.events import RequestArrived
from pdserve.text.chat import ChatTemplate

(SPACE,) = TOKENIZER.encode(" ", add_special=False)
Request = inference.GenerateRequest


# Its vocabulary ends before the tokenizer's.
SMALL = ServedModel("m", 100, SPACE, NO_DEFAULTS, TOKENIZER, ChatTemplate(TEMPLATE, {}))


def prompts() -> Prompts:
    return Prompts(SMALL, 4, 10.0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request(token_ids=inference.TokenIds(ids=[1, 220])),
            "token_ids: token id 220 at position 1 is outside [0, 219]",
        ),
        (Request(text="a b"), "text: token id 220 at position 1 is outside [0, 219]"),
        (
            Request(chat=inference.Chat(messages=[inference.ChatMessage(role="user", content="zen")])),
            "chat: token id 220 at position 5 is outside [0, 219]",
        ),
    ],
    ids=["token_ids", "text", "chat"],
)
async def test_ids_past_the_models_vocabulary_are_refused(request_: Request, message: str) -> None:
    served = prompts()
    with pytest.raises(RefusedError) as refused:
        await served.tokenize(request_, 100, 10.0)
    await served.close()
    assert (refused.value.refused.status, refused.value.refused.message) == (Status.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(("allowed", "num_ends"), [(False, 1), (True, 2)])
async def test_a_special_token_that_a_chats_text_spells_is_text_unless_it_is_allowed(
    allowed: bool, num_ends: int
) -> None:
    tokenizer = small_tokenizer()
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": "</s>"})
    model = ServedModel("m", 100, tokenizer.vocab_size, NO_DEFAULTS, tokenizer, chat)
    served = Prompts(replace(model, allow_special_tokens_in_text=allowed), 4, 10.0)
    message = inference.ChatMessage(role="user", content="a</s>b")
    in_chat = await served.tokenize(Request(chat=inference.Chat(messages=[message])), 100, 10.0)
    in_text = await served.tokenize(Request(text="a</s>b"), 100, 10.0)
    await served.close()
    assert list(in_chat).count(END) == num_ends
    assert list(in_text).count(END) == 1


def test_the_routers_setting_says_whether_texts_of_chats_make_special_tokens(tmp_path: Path) -> None:
    config = RouterConfig(model=str(model_folder(tmp_path)), secret_file=tmp_path / "secret")
    assert not load_model(config).allow_special_tokens_in_text
    assert load_model(config.model_copy(update={"allow_special_tokens_in_text": True})).allow_special_tokens_in_text


async def test_the_last_id_of_the_model_is_taken() -> None:
    served = prompts()
    request = Request(token_ids=inference.TokenIds(ids=[SPACE - 1]))
    assert list(await served.tokenize(request, 100, 10.0)) == [SPACE - 1]
    await served.close()


@pytest.mark.parametrize(("num_words", "is_inline"), [(8, True), (9, False)])
async def test_many_bad_words_are_tokenized_beside_the_event_loop(num_words: int, is_inline: bool) -> None:
    served = prompts()
    request = Request(sampling=inference.SamplingParams(bad_words=[f"w{number}" for number in range(num_words)]))
    threads: set[str] = set()
    encode = served._encode_bad_words

    def noting(given: Request) -> tuple[tuple[int, ...], ...]:
        threads.add(current_thread().name)
        return encode(given)

    served._encode_bad_words = noting  # type: ignore[method-assign]
    await served.with_bad_words(check_terms(request, SMALL, 1000, 0.0, 10.0), request, 10.0)
    await served.close()
    assert threads == {"MainThread"} if is_inline else "MainThread" not in threads


async def test_each_step_before_admission_has_what_is_left_of_the_deadline(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_s: list[float] = []

    class Noting(Prompts):
        async def with_bad_words(self, event: RequestArrived, request: Request, remaining_s: float) -> RequestArrived:
            left_s.append(remaining_s)
            return await super().with_bad_words(event, request, remaining_s)

        async def with_structured(
            self, event: RequestArrived, remaining_s: float, loosen: Loosen | None = None
        ) -> tuple[RequestArrived, tuple[str, ...]]:
            left_s.append(remaining_s)
            return await super().with_structured(event, remaining_s, loosen)

        async def tokenize(
            self, request: Request, max_model_len: int, remaining_s: float, *more: ChatTemplate | None
        ) -> TokenIds:
            left_s.append(remaining_s)
            return await super().tokenize(request, max_model_len, remaining_s, *more)

    monkeypatch.setattr(endpoints, "Prompts", Noting)
    router = await start_router()
    await router.pair()
    await collect(router.generate(text="a", max_tokens=1, deadline_ms=9000))
    assert len(left_s) == 3
    assert 9.0 > left_s[0] > left_s[1] > left_s[2]

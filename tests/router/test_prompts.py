"""Prompts are ids that tokenizer and model both know, whichever of them has the smaller vocabulary."""

import pytest
from router_fakes import TEMPLATE, TOKENIZER

from pdserve.checkpoint.checkpoint import NO_DEFAULTS
from pdserve.errors import RequestError, Status
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.prompts import Prompts, ServedModel
from pdserve.text.chat import ChatTemplate

(SPACE,) = TOKENIZER.encode(" ", add_special=False)
Request = inference.GenerateRequest


def prompts() -> Prompts:
    """Serve a model whose vocabulary ends before the tokenizer's."""
    return Prompts(ServedModel("m", 100, SPACE, NO_DEFAULTS, TOKENIZER, ChatTemplate(TEMPLATE, {})), 4, 10.0)


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
    with pytest.raises(RequestError) as refused:
        await served.token_ids(request_, 100, 10.0)
    await served.close()
    assert (refused.value.status, refused.value.message) == (Status.INVALID_ARGUMENT, message)


async def test_the_last_id_of_the_model_is_taken() -> None:
    served = prompts()
    request = Request(token_ids=inference.TokenIds(ids=[SPACE - 1]))
    assert list(await served.token_ids(request, 100, 10.0)) == [SPACE - 1]
    await served.close()

"""POST /v1/completions with a suffix, against a real router whose workers are fakes."""

from typing import Any

import pytest
from http_door import StartHttp
from router_fakes import FILLED_IN, LETTERS, TOKENIZER, tokens_of

from pdserve.protocol.token_ids import from_wire

COMPLETIONS = "/v1/completions"


async def test_the_answer_goes_before_the_suffix_of_each_prompt(start_http: StartHttp) -> None:
    door = await start_http()
    given = await door.client.completions.create(
        model="tiny", prompt=["a = ", "b = "], suffix="\nprint(a)", max_tokens=4
    )
    prompts = [FILLED_IN.format(prompt, "\nprint(a)") for prompt in ("a = ", "b = ")]
    specs = [place.spec for place in door.router.workers["p0"].prefills]
    assert [TOKENIZER.decode(list(from_wire(spec.token_ids, "token_ids"))) for spec in specs] == prompts
    answers = [tokens_of(TOKENIZER.encode(prompt, add_special=False), 4) for prompt in prompts]
    assert [choice.text for choice in given.choices] == [TOKENIZER.decode(answer) for answer in answers]
    streamed = await door.client.completions.create(
        model="tiny", prompt="a = ", suffix="\nprint(a)", max_tokens=4, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in streamed]) == given.choices[0].text


async def test_what_models_write_behind_a_middle_ends_it_too(start_http: StartHttp) -> None:
    door = await start_http()
    await door.post(COMPLETIONS, prompt="a", suffix="b", max_tokens=1, stop_token_ids=[3])
    await door.post(COMPLETIONS, prompt="a", max_tokens=1, suffix="")
    with_suffix, without = (place.spec.sampling.stop_token_ids for place in door.router.workers["p0"].prefills)
    assert list(with_suffix) == [3, LETTERS[25]]
    assert not list(without)


@pytest.mark.parametrize(
    ("asked", "param", "text"),
    [
        ({"prompt": [1, 2]}, "suffix", "goes with prompts that are texts"),
        ({"prompt": [[1, 2]]}, "suffix", "goes with prompts that are texts"),
        ({"prompt": "a", "echo": True}, "suffix", "goes neither with echo"),
        ({"prompt": "a", "prompt_logprobs": 0}, "suffix", "goes neither with echo"),
        ({"prompt": "a", "add_special_tokens": False}, "suffix", "goes neither with echo"),
        ({"prompt": "a" * 9000}, "prompt", "9004 characters"),
        ({"prompt": "a", "stop_token_ids": [1] * 128}, "stop_token_ids", "128 and the 1 of a suffix are over 128"),
    ],
)
async def test_bad_requests_are_refused_by_field(
    start_http: StartHttp, asked: dict[str, Any], param: str, text: str
) -> None:
    door = await start_http()
    refused = await door.post(COMPLETIONS, **asked, suffix="b")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert text in error["message"]


async def test_a_model_without_the_tokens_says_so(start_http: StartHttp) -> None:
    door = await start_http(template=None)
    error = (await door.post(COMPLETIONS, prompt="a", suffix="b")).json()["error"]
    assert error["message"] == "suffix: the model has no tokens to fill in the middle"

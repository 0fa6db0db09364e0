"""Keys of top_logprobs are distinct, there are as many as asked for, and streams and echoes name tokens alike."""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from http_door import StartHttp
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import LETTERS, MODEL, TOKENIZER, token_ids_of, tokens_of
from small_vocabulary import small_tokenizer
from tokenizers import decoders, models

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.dialect import COMPLETION, Choice, Prompt, Response, Shown
from pdserve.router.frontend.openai.logprobs import TokenNames, completion_logprobs
from pdserve.text.tokenizer import Tokenizer


def with_twins() -> Tokenizer:
    """Return a tokenizer of SentencePiece's kind, in which a byte and a word may have the same text."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "b", "ab", "▁", "▁a", "é", "あ", "<s>"]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


TOKENIZERS = (small_tokenizer(), with_twins())
tokenizers_drawn = st.sampled_from(TOKENIZERS)


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[inference.TokenLogprobs]]:
    """Draw tokens, each with its likeliest tokens, of which it may be one."""
    tokenizer = draw(tokenizers_drawn)
    ids = st.integers(0, tokenizer.vocab_size + 3)  # some beyond it, as embeddings are padded
    answer = draw(st.lists(ids, max_size=8))
    num_top = draw(st.integers(0, 20))
    logprobs = []
    for token_id in answer:
        top = draw(st.lists(ids, min_size=num_top, max_size=num_top, unique=True))
        if top and draw(st.booleans()) and token_id not in top:
            top[-1] = token_id
        found = [inference.TokenLogprob(token_id=each, logprob=-1.0 - place) for place, each in enumerate(top)]
        chosen = -1.0 - top.index(token_id) if token_id in top else -50.0
        logprobs.append(inference.TokenLogprobs(chosen=chosen, top=found))
    return tokenizer, answer, logprobs


Scored = tuple[Tokenizer, list[int], list[inference.TokenLogprobs]]


@given(scored(), st.booleans())
def test_every_likely_token_has_a_key_of_its_own_and_the_chosen_one_its_value(drawn: Scored, as_ids: bool) -> None:
    tokenizer, ids, logprobs = drawn
    shown = completion_logprobs(TokenNames(tokenizer, as_ids), ids, logprobs)
    for token_id, name, top, each in zip(ids, shown["tokens"], shown["top_logprobs"], logprobs, strict=True):
        likely = {found.token_id for found in each.top}
        assert len(top) == len(likely | {token_id})
        assert top[name] == each.chosen
        assert "\ufffd" not in "".join(top)
        assert sorted(top.values(), reverse=True)[: len(likely)] == [found.logprob for found in each.top]
        if as_ids:
            assert set(top) == {f"token_id:{found}" for found in likely | {token_id}}


def test_bytes_that_are_no_text_are_written_as_openai_writes_them() -> None:
    names = TokenNames(small_tokenizer())
    first = names.tokenizer.encode("😀", add_special=False)[0]
    assert names.of(first) == r"bytes:\xf0"
    shown = completion_logprobs(names, [first], [None])
    assert (shown["tokens"], shown["top_logprobs"]) == ([r"bytes:\xf0"], [None])


def parts_of(response: Response, choice: Choice, gains: Sequence[Gain]) -> dict[str, list[Any]]:
    """Return the log probabilities in all chunks of a stream, joined."""
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    events = b"".join(response.chunks(choice, gain) for gain in gains).split(b"\n\n")[:-1]
    for event in events:
        (shown,) = json.loads(event.removeprefix(b"data: "))["choices"]
        for name, values in (shown["logprobs"] or {}).items():
            joined[name] += values
    return joined


@given(scored(), st.lists(st.integers(1, 3), min_size=8, max_size=8), st.booleans())
def test_a_stream_shows_what_a_whole_answer_shows(drawn: Scored, sizes: list[int], echoes: bool) -> None:
    tokenizer, ids, logprobs = drawn
    echo = "ab" if echoes else ""
    prompt = [inference.TokenLogprobs(chosen=-2.0, top=logprobs[0].top if logprobs else ())]

    def choice() -> Choice:
        return Choice(0, Prompt(echo, tokenizer.encode("ab", add_special=False)[:2], list(prompt)))

    response = Response(COMPLETION, MODEL, tokenizer, Shown(logprobs=True))
    gains, start, detokenizer = [], 0, tokenizer.detokenizer(at_start=False)
    for size in sizes:
        part = ids[start : start + size]
        gains.append(Gain(0, part, detokenizer.push(part), logprobs[start : start + size]))
        start += size
    text = tokenizer.detokenizer(at_start=False)
    everything = Gain(0, ids, text.push(ids) + text.flush(), logprobs)
    (whole,) = json.loads(response.body([(choice(), everything)], {}, {}))["choices"]
    expected = whole["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if ids:
        assert parts_of(response, choice(), gains) == expected
    whole_text = "".join(map(TokenNames(tokenizer).of, ids))
    if "bytes:" not in whole_text and "<" not in whole_text and ids:  # then every name is text of the answer
        for name, offset in zip(expected["tokens"], expected["text_offset"], strict=True):
            assert whole["text"][offset:].startswith(name)


async def test_tokens_are_shown_as_ids_on_demand(start_http: StartHttp) -> None:
    door = await start_http()
    for worker in door.router.workers.values():
        worker.logprobs_per_token = 2
    asked: dict[str, Any] = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    answer = await door.post("/v1/completions", prompt="hello", logprobs=2, **asked)
    prompt = list(token_ids_of(door.router.workers["p0"].prefills[0].spec))
    ids = tokens_of(prompt, 3)
    shown = answer.json()["choices"][0]
    assert shown["logprobs"]["tokens"] == [f"token_id:{each}" for each in ids]
    assert set(shown["logprobs"]["top_logprobs"][0]) == {"token_id:0", "token_id:1", f"token_id:{ids[0]}"}
    assert shown["text"] == TOKENIZER.decode(ids)
    assert "x-ignored-fields" not in answer.headers
    chat: Any = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **asked}
    content = (await door.post("/v1/chat/completions", **chat)).json()["choices"][0]["logprobs"]["content"]
    assert {int(each["token"].removeprefix("token_id:")) for each in content} <= set(LETTERS)
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["token_id:0", "token_id:1"]


async def test_logprobs_false_means_none(start_http: StartHttp) -> None:
    door = await start_http()
    for worker in door.router.workers.values():
        worker.logprobs_per_token = 1
    for echo in (False, True):
        answer = await door.post("/v1/completions", prompt="hello", max_tokens=2, logprobs=False, echo=echo)
        assert (answer.status_code, answer.json()["choices"][0]["logprobs"]) == (200, None)
    sampling = door.router.workers["p0"].prefills[0].spec.sampling
    assert not sampling.HasField("logprobs")

"""Requests whose right answers are known: those of one engine alone.

Lengths are mixed, sampling is greedy or random, and each request has a seed: its answer is the same on any cluster.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.offline import LoneEngine
from pdserve.measure.outcomes import OK, Outcome
from pdserve.model.loading import load_model
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import params_to_proto
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

Answer = Mapping[int, Sequence[int]]  # tokens by continuation

_SHARE_GREEDY, _SHARE_SHARED, _SHARE_TWO = 0.5, 0.3, 0.1
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Most tokens of a prompt and of an answer."""

    prompt: int = 512
    answer: int = 48
    are_answers_equal: bool = False  # whether each request has one continuation, of exactly `answer` tokens


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """One request, and its right answer where that is known."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: Answer

    def message(self, deadline_s: float, tenant: str = "") -> inference.GenerateRequest:
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=self.prompt),
            sampling=params_to_proto(self.params),
            deadline_ms=round(deadline_s * 1e3),
            tenant=tenant,
        )


def known_requests(
    model: str, dtype: str, count: int, lengths: Lengths, seed: int, code: KvCode | None = None
) -> list[KnownRequest]:
    """Return requests with the answers of one engine alone; requests whose answer depends on rounding are left out.

    code: the form of K and V.
    """
    torch.set_num_threads(1)  # for each alone, a small model's steps are too short to share
    checkpoint = open_checkpoint(Path(model))
    form = choose_quantization("auto", checkpoint, dtype, "cpu")
    loaded = load_model(checkpoint.config, weights_in_form(checkpoint, form), _DTYPES[dtype])
    engine = LoneEngine(loaded, checkpoint.eos_token_ids, lengths.prompt + lengths.answer, code)
    drawn = random_requests(checkpoint.config.vocab_size, lengths, seed)
    requests = islice((request for request in drawn if not engine.is_tied(*request)), count)
    return [KnownRequest(prompt, params, engine.answer(prompt, params)) for prompt, params in requests]


def random_requests(vocab_size: int, lengths: Lengths, seed: int) -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
    """Yield requests with short and long prompts and answers; some prompts begin alike."""
    rng = random.Random(f"asks {seed}")
    stem = [rng.randrange(vocab_size) for _ in range(lengths.prompt // 4)]
    while True:
        length = round(lengths.prompt ** rng.uniform(0.3, 1.0))
        start = stem[: length // 2] if rng.random() < _SHARE_SHARED else []
        prompt = (*start, *(rng.randrange(vocab_size) for _ in range(length - len(start))))
        params = SamplingParams(
            max_tokens=lengths.answer if lengths.are_answers_equal else rng.randint(1, lengths.answer),
            temperature=0.0 if rng.random() < _SHARE_GREEDY else 1.0,
            seed=rng.getrandbits(63),
            n=2 if rng.random() < _SHARE_TWO and not lengths.are_answers_equal else 1,
            ignore_eos=True,
        )
        yield prompt, params


def difference(tokens: Answer, expected: Answer, *, is_whole: bool) -> str:
    """Return where tokens first differ from the expected ones; empty where all that came are as expected."""
    for index, right in expected.items():
        got = tokens.get(index, ())
        for place, (one, other) in enumerate(zip(got, right, strict=False)):
            if one != other:
                return f"continuation {index}: token {place} of {len(right)} is {one}, {other} was expected"
        if len(got) > len(right) or (is_whole and len(got) < len(right)):
            return f"continuation {index}: {len(got)} tokens came, {len(right)} were expected"
    extra = set(tokens) - set(expected)
    return f"continuations {sorted(extra)} were not asked for" if extra else ""


def check_answer(outcome: Outcome, requests: Sequence[KnownRequest]) -> None:
    """Compare an answer with the right one, and drop its tokens. Requests are sent in turn, over and over."""
    right = requests[outcome.number % len(requests)].answer
    outcome.wrong = difference(outcome.tokens, right, is_whole=outcome.status == OK)
    outcome.tokens, outcome.times_s = {}, {}

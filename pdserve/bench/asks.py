"""Requests of mixed lengths, greedy and drawn, each with a seed: equal asks have equal answers on any cluster."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.sampling import SamplingParams

Answers = Mapping[int, tuple[int, ...]]  # tokens by continuation

_SHARE_GREEDY, _SHARE_SHARED, _SHARE_TWO = 0.5, 0.3, 0.1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Most tokens of a prompt and of an answer."""

    prompt: int = 512
    answer: int = 48


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def message(self, deadline_s: float) -> inference.GenerateRequest:
        """Return it as a client sends it."""
        params = self.params
        sampling = inference.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,  # said, like the rest, lest the model's own defaults apply
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_tokens,
            seed=params.seed,
            n=params.n,
            ignore_eos=params.ignore_eos,
        )
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=self.prompt), sampling=sampling, deadline_ms=round(deadline_s * 1e3)
        )


def draw_asks(count: int, vocab_size: int, lengths: Lengths, seed: int) -> list[Ask]:
    """Return requests with short and long prompts and answers; some prompts begin alike."""
    rng = random.Random(f"asks {seed}")
    stem = [rng.randrange(vocab_size) for _ in range(lengths.prompt // 4)]
    return [_draw(rng, vocab_size, lengths, stem) for _ in range(count)]


def _draw(rng: random.Random, vocab_size: int, lengths: Lengths, stem: list[int]) -> Ask:
    length = round(lengths.prompt ** rng.uniform(0.3, 1.0))
    start = stem[: length // 2] if rng.random() < _SHARE_SHARED else []
    prompt = (*start, *(rng.randrange(vocab_size) for _ in range(length - len(start))))
    params = SamplingParams(
        max_tokens=rng.randint(1, lengths.answer),
        temperature=0.0 if rng.random() < _SHARE_GREEDY else 1.0,
        seed=rng.getrandbits(63),
        n=2 if rng.random() < _SHARE_TWO else 1,
        ignore_eos=True,
    )
    return Ask(prompt, params)

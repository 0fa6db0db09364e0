"""Answers of engines whose ranks have memory of their own, with guesses, or without."""

from dataclasses import replace
from pathlib import Path

from engine_runs import Answers, Asked, answers, engine_of, worker_config
from model_zoo import prompt
from rank_pages import ranks

from pdserve.protocol.sampling import SamplingParams

OWN: dict[str, object] = {"rank_memory": "own"}
RANKS: dict[str, object] = {**OWN, "tensor_parallel_size": 2}
ALONE: dict[str, object] = {"device": "interpreter", **OWN}
DEVICES: dict[str, object] = {"device": "interpreter", "tensor_parallel_size": 2}
SMALL: dict[str, object] = {"max_num_seqs": 2}  # an interpreter computes each row of the sizes that a GPU captures

FEW = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=(9, 10, 11))  # they repeat
ASKED: list[Asked] = [
    (prompt(42, 1), FEW),
    (prompt(5, 2), replace(FEW, seed=3, temperature=0.6, n=2, max_tokens=20)),
    (prompt(16, 3), replace(FEW, frequency_penalty=0.1)),
]
SHORT: list[Asked] = [
    (prompt(12, 1), replace(FEW, max_tokens=9)),
    (prompt(5, 2), replace(FEW, frequency_penalty=0.1, max_tokens=7)),
]


def found(folder: Path, asked: list[Asked], **settings: object) -> tuple[Answers, Answers]:
    """Return answers, and then one to a prompt that goes on behind the first of them, whose pages are cached."""
    with engine_of(worker_config(folder, **settings)) as engine:
        assert len(ranks()) == int(str(settings.get("tensor_parallel_size", 1))) - 1
        first = answers(engine, asked)
        (token_ids, params), *_ = asked
        return first, answers(engine, [([*token_ids, *first.texts[0, 0]], replace(params, max_tokens=4))])


def assert_guesses_change_no_token(
    folder: Path, asked: list[Asked], guessed: dict[str, object], **settings: object
) -> tuple[Answers, Answers]:
    """Compare with one rank on a CPU that does not guess; return the answers with guesses."""
    plain, plain_again = found(folder, asked)
    first, again = found(folder, asked, speculative_config={"num_speculative_tokens": 3, **guessed}, **settings)
    assert first.texts == plain.texts
    assert again.texts == plain_again.texts
    return first, again

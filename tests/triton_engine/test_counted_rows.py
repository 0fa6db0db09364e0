"""A row has counted the prompt and the answer of its sequence when the sequence's next token is sampled."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import InvariantError
from pdserve.engine.counted_rows import CountedRows
from pdserve.engine.step import SampleSpec
from pdserve.engine.verification import behind
from pdserve.kernels.sample import NO_COUNTS
from pdserve.protocol.sampling import SamplingParams

VOCAB = 12
PENALIZED, PLAIN = SamplingParams(frequency_penalty=0.5), SamplingParams()


@dataclass
class Text:
    number: int
    prompt: list[int]
    answer: list[int] = field(default_factory=list)

    def spec(self, *, is_ahead: bool) -> SampleSpec:
        known = self.answer[:-1] if is_ahead else self.answer
        params = PLAIN if self.number == 0 else PENALIZED
        return SampleSpec(params, 1, len(self.answer), self.prompt, known, False, (self.number, 0), None, is_ahead)

    def counts(self) -> list[int]:
        written = np.bincount(self.answer, minlength=VOCAB)
        return (2 * written + np.isin(np.arange(VOCAB), self.prompt)).tolist()


def sampled(
    rows: CountedRows, texts: list[Text], tokens: list[int], ahead: set[int], guessed: tuple[list[int], int] = ([], 0)
) -> None:
    """Take a step's rows, check them, and count a token in each as the sampler does.

    tokens: one for each text. guessed: what is verified of answers that are not ahead, and how much of it is right.
    """
    guesses, num_right = guessed
    guesses_of = [guesses if text.answer and text.number not in ahead else [] for text in texts]
    specs: list[SampleSpec] = []
    for text, own in zip(texts, guesses_of, strict=True):
        spec = text.spec(is_ahead=text.number in ahead)
        specs += [behind(spec, own[:number]) for number in range(len(own) + 1)]
    slots = rows.take(specs).tolist()
    counted = [slot for slot in slots if slot != NO_COUNTS]
    assert len(set(counted)) == len(counted)
    for text, own, token in zip(texts, guesses_of, tokens, strict=False):
        drawn, known = [*own[:num_right], *[token] * (1 + len(own[num_right:]))], list(text.answer)
        for number, (slot, drawn_token) in enumerate(zip(slots, drawn, strict=False)):
            assert (slot == NO_COUNTS) == (text.number == 0)
            if slot != NO_COUNTS:
                assert rows.counts[slot].tolist() == Text(text.number, text.prompt, known + own[:number]).counts()
                rows.counts[slot, drawn_token] += 2
        del slots[: len(drawn)]
        num_kept = 1 + next((n for n, guess in enumerate(own) if guess != drawn[n]), len(own))
        text.answer += drawn[:num_kept]


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),  # whose tokens are sampled
        st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4),  # these tokens
        st.booleans(),  # whether the step is planned ahead
        st.booleans(),  # whether it is computed again, with other tokens
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), max_size=3), st.integers(0, 3)
        ),  # guesses, and how many are right
    ),
    max_size=12,
)


@given(steps=STEPS, num_rows=st.integers(1, 9))
def test_rows_are_up_to_date_whoever_samples_when_behind_whatever_guesses(
    steps: list[tuple[list[int], list[int], bool, bool, tuple[list[int], int]]], num_rows: int
) -> None:
    rows = CountedRows(num_rows, VOCAB, torch.device("cpu"))
    texts = [Text(number, [number, 2 * number, number]) for number in range(6)]
    before: set[int] = set()
    for members, tokens, is_ahead, is_repeated, guessed in steps:
        step = [texts[number] for number in members]
        known = [list(text.answer) for text in step]
        sampled(rows, step, tokens, before if is_ahead else set(), guessed)
        if is_repeated:
            for text, answer in zip(step, known, strict=True):
                text.answer[:] = answer
            sampled(rows, step, tokens[::-1], set(), guessed)
        before = set(members)
        assert len(rows.counts) <= max(num_rows, 4 * len(texts)), "rows that nobody needs are taken again"


def test_a_token_that_neither_host_nor_device_knows_is_our_own_fault() -> None:
    rows = CountedRows(2, VOCAB, torch.device("cpu"))
    with pytest.raises(InvariantError, match="no row has counted 2 tokens"):
        rows.take([Text(1, [3], [4, 5]).spec(is_ahead=True)])


def test_two_samples_of_one_place_are_our_own_fault() -> None:
    text = Text(1, [3], [4, 5])
    with pytest.raises(InvariantError, match="a step samples tokens 2 and 2"):
        CountedRows(2, VOCAB, torch.device("cpu")).take([text.spec(is_ahead=False)] * 2)


def test_the_prompt_of_a_first_token_and_the_answer_of_a_later_one_are_counted_together() -> None:
    rows, texts = CountedRows(1, VOCAB, torch.device("cpu")), [Text(1, [3, 3]), Text(2, [], [3, 3]), Text(3, [1], [2])]
    sampled(rows, texts, [4, 5, 6], set())
    assert len(rows.counts) == 3, "a step's rows are there whatever was asked for"
    sampled(rows, texts, [4, 5, 6], {1, 2, 3})


def test_rows_for_which_there_is_no_memory_are_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_tensors: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    rows, texts = CountedRows(2, VOCAB, torch.device("cpu")), [Text(number, [number]) for number in range(1, 5)]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", fail)
        with pytest.raises(torch.OutOfMemoryError):
            rows.take([text.spec(is_ahead=False) for text in texts])
    for half in (texts[:2], texts[2:], texts):
        assert len(set(rows.take([text.spec(is_ahead=False) for text in half]).tolist())) == len(half)
        assert max(rows.take([text.spec(is_ahead=False) for text in half]).tolist()) < len(rows.counts)

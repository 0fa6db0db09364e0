"""Layers that keep a state verify guesses: the state is that behind the last right one, and the tokens are the same."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from equal_states import ALONE
from guessing_bench import REPEATED, Bench, Name, add_requests, assert_same, ids
from loaded_models import loaded_model
from long_cases import long, long_but
from model_zoo import STATES, write_model

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.batch import Batch, Ints, PoolShape
from pdserve.engine.states import States
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan
from pdserve.engine.verification import num_kept
from pdserve.model.family import Model
from pdserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def small(folder: Path, family: str) -> Model:
    return loaded_model(write_model(family, folder, **ALONE[family]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small(tmp_path_factory.mktemp("model"), "qwen3.5")


@pytest.fixture(params=["compiled", *long("torch")])
def _in_torch_or_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes states."""
    if request.param == "torch":
        monkeypatch.setattr("pdserve.engine.runner.states_of", lambda _: States)


def served_again(bench: Bench, known: dict[Name, list[int]]) -> list[list[int]]:
    """Ask for what follows answers that are in the cache, and return it. Nothing is guessed of it."""
    before = len(bench.answers)
    for place, name in enumerate(sorted(known)[:4]):
        number = name[0]
        asked = [*REPEATED, 14 + number, *REPEATED[: number + 2], *known[name]]
        bench.add(100 + place, asked, GREEDY)
    bench.run()
    assert len(bench.answers) == before + 4
    return [ids(bench.answers)[100 + place, 0] for place in range(4)]


@pytest.mark.usefixtures("_in_torch_or_compiled")
@pytest.mark.parametrize("drafter", ["mostly_right", *long("right", "liar", "ngram")])
@pytest.mark.parametrize("family", long_but(("lfm2",), STATES))
def test_answers_scores_and_cached_states_are_those_without_guesses(family: str, drafter: str, tmp_path: Path) -> None:
    model = small(tmp_path, family)
    plain = add_requests(Bench(model)).run()
    known = ids(plain.answers)
    bench = add_requests(Bench(model, drafter=drafter, known=known)).run()
    assert bench.runner.groups[-1].page_size <= 64, "guesses pass the ends of spans"
    assert_same(bench, plain, close=4e-5)  # without guesses they differ by as much as 6e-6
    assert bench.counts["guesses"] > 0
    if drafter in ("right", "mostly_right"):
        assert bench.counts["right"] > 100
        assert bench.counts["steps"] < 0.7 * plain.counts["steps"]
    assert set(bench.scheduler.cache.spans) == set(plain.scheduler.cache.spans)
    assert served_again(bench, known) == served_again(plain, known)


def test_preempted_sequences_begin_their_states_anew_with_guesses(model: Model) -> None:
    plain = add_requests(Bench(model)).run()
    bench = add_requests(Bench(model, 30, "mostly_right", ids(plain.answers))).run()
    assert bench.scheduler.num_preemptions > 0
    assert ids(bench.answers) == ids(plain.answers)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_state_behind_one_guess_more_or_less_would_change_the_answer(
    model: Model, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Bench(model)
    plain.add(0, REPEATED, GREEDY)
    known, kept = ids(plain.run().answers), Batch.num_kept

    def changed(batch: Batch, sampled: Sequence[int], stuck: Collection[int]) -> Ints | None:
        found = kept(batch, sampled, stuck)
        return None if found is None else np.clip(found + change, 1, batch.chains.query_lens)

    monkeypatch.setattr(Batch, "num_kept", changed)
    bench = Bench(model, drafter="mostly_right", known=known)
    bench.add(0, REPEATED, GREEDY)
    assert ids(bench.run().answers) != known


@pytest.mark.parametrize(
    ("sampled", "stuck", "count"),
    [
        ([8, 9, 1], [], 3),  # the guesses, and one more token
        ([8, 7, 1], [], 2),
        ([7, 9, 1], [], 1),
        ([8, 9, 1], [2], 2),  # nothing can follow the last guess
        ([8, 9, 1], [1], 1),
    ],
)
def test_rows_are_final_up_to_the_first_wrong_guess_and_before_one_that_nothing_can_follow(
    sampled: list[int], stuck: list[int], count: int
) -> None:
    assert num_kept([8, 9], sampled, [row in stuck for row in range(3)]) == count
    batch = Batch.of(StepPlan((prompt(), *chain((7, 8, 9)), row(5, 40))), PoolShape(20, 16, 99, (16,), has_states=True))
    found = batch.num_kept([1, *sampled, 3], {1 + place for place in stuck})
    assert found is not None
    assert found.tolist() == [1, count, 20]
    assert batch.chains.query_lens.tolist() == [1, 3, 20]
    assert batch.chains.kv_lens.tolist() == [41, 33, 20]
    assert batch.chains.has_guesses.tolist() == [False, True, False]


def test_a_batch_without_guesses_keeps_all_that_it_computes() -> None:
    batch = Batch.of(StepPlan((prompt(), row(5, 40))), PoolShape(20, 16, 99, (16,), has_states=True))
    assert batch.num_kept([1, 2], ()) is None
    assert batch.chains.query_lens.tolist() == [1, 20]


def test_a_guess_that_is_not_behind_the_chunk_before_it_is_refused() -> None:
    first, second, _ = chain((7, 8, 9))
    for rows in ((second,), (prompt(), second), (first, row(8, 40, continues=True))):
        with pytest.raises(InvariantError, match="a guess at position"):
            Batch.of(StepPlan(rows), PoolShape(20, 16, 99, (16,), has_states=True))


def spec() -> SampleSpec:
    return SampleSpec(GREEDY, 0, 1, (), (), forbid_stops=False, sequence=(0, 0))


def prompt() -> Chunk:
    pages = (PageId(0), PageId(1))
    return Chunk(range(20), 0, pages, (), other_pages=(pages,))


def row(token_id: int, start: int, *, continues: bool = False) -> Chunk:
    pages = (PageId(2), PageId(3), PageId(4))
    return Chunk((token_id,), start, pages, (spec(),), Phase.DECODE, other_pages=(pages,), continues=continues)


def chain(token_ids: tuple[int, ...]) -> list[Chunk]:
    return [row(token_id, 30 + place, continues=place > 0) for place, token_id in enumerate(token_ids)]

import os

import pytest

from pdserve.executor import threads
from pdserve.executor.threads import SPIN_COUNT, given_environment, rank_threads, thread_defaults


def test_the_users_thread_settings_come_before_ours() -> None:
    environment = {"OMP_NUM_THREADS": "1", "HOME": "/h"}
    with thread_defaults(environment, None):
        assert environment == {"OMP_NUM_THREADS": "1", "HOME": "/h", "GOMP_SPINCOUNT": SPIN_COUNT, "KMP_BLOCKTIME": "1"}


def test_an_engine_computes_with_every_core_it_may_use_one_thread_on_each() -> None:
    environment: dict[str, str] = {}
    with thread_defaults(environment, None):
        assert environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        assert environment["OMP_PROC_BIND"] == "true"


def test_an_engine_with_fewer_threads_than_cores_is_bound_to_none() -> None:
    environment: dict[str, str] = {}
    with thread_defaults(environment, 3):
        assert "OMP_PROC_BIND" not in environment


def test_a_thread_that_loading_bound_is_free_again() -> None:
    cores = os.sched_getaffinity(0)
    with thread_defaults({}, None):
        os.sched_setaffinity(0, {min(cores)})
    assert os.sched_getaffinity(0) == cores


def test_ranks_share_out_the_cores_evenly_and_children_learn_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(threads, "in_cores", tuple)
    of_ranks: list[dict[str, str]] = [{}, {}]
    for rank, environment in enumerate(of_ranks):
        with thread_defaults(environment, None, rank=rank, num_ranks=2):
            pass
    found = [(each["OMP_NUM_THREADS"], each["OMP_PLACES"]) for each in of_ranks]
    assert found == [("2", "{0},{1}"), ("2", "{2},{3}")]
    assert rank_threads(5, 2) == 2
    assert rank_threads(1, 2) == 1
    monkeypatch.setenv("OMP_PLACES", "as chosen above")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert "OMP_PLACES" not in given_environment()
    assert given_environment()["MALLOC_ARENA_MAX"] == "1"

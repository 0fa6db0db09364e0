import os

from pdserve.executor.threads import SPIN_COUNT, thread_defaults


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

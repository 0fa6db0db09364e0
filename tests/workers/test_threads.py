from pdserve.worker.threads import SPIN_COUNT, set_thread_defaults


def test_the_users_thread_settings_come_before_ours() -> None:
    environment = {"OMP_NUM_THREADS": "1", "HOME": "/h"}
    set_thread_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_an_engine_computes_with_every_core_it_may_use() -> None:
    environment: dict[str, str] = {}
    set_thread_defaults(environment)
    assert int(environment["OMP_NUM_THREADS"]) >= 1

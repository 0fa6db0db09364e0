import threading

from pdserve.worker.threads import SPIN_COUNT, EngineThread, set_thread_defaults


def test_the_users_thread_settings_come_before_ours() -> None:
    environment = {"OMP_NUM_THREADS": "1", "HOME": "/h"}
    set_thread_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_an_engine_computes_with_every_core_it_may_use() -> None:
    environment: dict[str, str] = {}
    set_thread_defaults(environment)
    assert int(environment["OMP_NUM_THREADS"]) >= 1


async def test_everything_called_runs_in_one_thread_in_order() -> None:
    async with EngineThread() as thread:
        names = [thread.call(threading.get_ident) for _ in range(3)]
        idents = [await name for name in names]
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()

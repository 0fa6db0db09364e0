"""Torch computes in one thread of a worker, from loading the weights to the last step."""

import threading
from pathlib import Path

import pytest
from worker_settings import built, settings_of_tiny

from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.executor import form, loading
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.settings.config import WorkerConfig


def config_of(folder: Path, **settings: object) -> WorkerConfig:
    return settings_of_tiny(folder, **{"num_pages": 8, **settings})


def engine_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("engine")}


def test_weights_are_loaded_and_steps_computed_in_one_thread_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    before = engine_threads()

    def load(*given: object) -> Model:
        seen.append(("load", threading.get_ident()))
        return load_model(*given)  # type: ignore[arg-type]

    class Noted(Runner):
        def run(self, plan: StepPlan) -> StepResult:
            seen.append((f"step {plan.chunks[0].token_ids[0]}", threading.get_ident()))
            return super().run(plan)

    monkeypatch.setattr(form, "load_model", load)
    monkeypatch.setattr(loading, "Runner", Noted)
    config = config_of(tmp_path)
    executor = built(config).executor
    plans = [StepPlan((Chunk((token,), 0, (PageId(0),), ()),)) for token in range(3)]
    for step in [executor.start(plan) for plan in plans]:
        step.result(60)
    assert [what for what, _ in seen] == ["load", "step 0", "step 1", "step 2"]
    assert len({ident for _, ident in seen}) == 1
    assert threading.get_ident() not in {ident for _, ident in seen}
    assert engine_threads() - before == {ident for _, ident in seen}
    executor.close()
    assert not engine_threads() - before


@pytest.mark.parametrize("settings", [{"max_model_len": 65}, {"kv_cache_memory_bytes": 1 << 50, "num_pages": None}])
def test_a_worker_that_is_refused_leaves_no_thread(tmp_path: Path, settings: dict[str, int | None]) -> None:
    config, before = config_of(tmp_path, **settings), engine_threads()
    with pytest.raises(ConfigError, match=next(iter(settings))):
        built(config)
    assert not engine_threads() - before

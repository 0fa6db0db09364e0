"""An answer of a real model that moves between two engines is the answer of one."""

import numpy as np
import pytest
import torch
from joined_cores import PAGE_SIZE
from small_models import small_model
from two_workers import Workers, alone, new_job

from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.model.family import Model

PROMPT = [17, 200, 3, 511, 42, 8, 77]


class Engine(Runner):
    """A model's pages as bytes."""

    def read(self, page: PageId) -> bytes:
        return self.kv[page].numpy().tobytes()

    def write(self, page: PageId, content: bytes) -> None:
        whole = np.frombuffer(content, np.float32).reshape(self.kv[page].shape)
        self.kv[page] = torch.from_numpy(whole.copy())


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 20, "logprobs": 3},
        {"temperature": 0.8, "n": 2},
    ],
)
def test_a_moved_answer_is_that_of_one_engine(model: Model, params: dict[str, float]) -> None:
    def new_engine(num_pages: int) -> Engine:
        return Engine(model, num_pages, PAGE_SIZE, ())

    job = new_job(3, PROMPT, max_tokens=32, **params)
    workers = Workers(new_runner=new_engine)
    workers.start(job)
    workers.steps_of("s", 7)
    for index in job.indices:
        workers.move(job, index)
        workers.steps_of("s", 5)
    assert {workers.answers[job.request_id, index].worker for index in job.indices} == {"t"}
    workers.steps_of("t", 4)
    workers.move(job, target="s")
    workers.steps_of("t", 5)
    assert workers.answers[job.request_id, 0].worker == "s"
    workers.run()
    wanted = alone(job, new_engine)
    for index in job.indices:
        tokens = workers.output(job, index)
        assert [token.token_id for token in tokens] == [token.token_id for token in wanted[index]]
        assert [token.logprobs is None for token in tokens] == ["logprobs" not in params] * len(tokens)
    workers.assert_nothing_held()

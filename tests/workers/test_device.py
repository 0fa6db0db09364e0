"""Where a worker's engine runs, and what is said when it cannot."""

from pathlib import Path

import pytest
import torch

from pdserve.config import PrefillWorkerConfig
from pdserve.errors import ConfigError
from pdserve.worker.boot import engine_device
from pdserve.worker.regions import require_movable


def config_of(**settings: object) -> PrefillWorkerConfig:
    given = {"model": "m", "worker_id": "w", "routers": ("host:1",), "secret_file": Path("secret"), **settings}
    return PrefillWorkerConfig.model_validate(given)


def test_left_to_itself_a_worker_runs_where_its_pages_can_be_handed_off() -> None:
    device = config_of().device
    require_movable(device)
    assert engine_device(config_of()) == torch.device("cpu")


def test_a_worker_whose_pages_could_not_be_handed_off_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda is not supported by workers"):
        require_movable(config_of(device="cuda").device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda is asked for, and torch sees no CUDA device"):
        engine_device(config_of(device="cuda"))

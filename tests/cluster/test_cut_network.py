from pathlib import Path

import pytest
from network_namespace import run_inside


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_network() -> None:
    run_inside(Path(__file__).with_name("cut_network_inside.py"))

from pathlib import Path

import pytest
from network_namespace import run_inside
from second_machine import NEEDED


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_machines() -> None:
    run_inside(Path(__file__).with_name("two_machines_inside.py"), NEEDED)

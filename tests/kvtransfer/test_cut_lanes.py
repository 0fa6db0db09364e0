from pathlib import Path

from network_namespace import run_inside


def test_cut_lanes() -> None:
    run_inside(Path(__file__).with_name("cut_lanes_inside.py"))

"""A worker registers with what it computes on."""

from pathlib import Path

from pdserve.worker.boot import MAX_CHARACTERS, device_name


def test_a_cpu_is_named_by_its_model_and_the_interpreter_apart(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")
    assert device_name("cpu", info) == device_name("auto", info) == "Fast CPU @ 3 GHz"
    assert device_name("interpreter", info) == "interpreter, Fast CPU @ 3 GHz"


def test_a_cpu_without_a_model_name_has_some_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert device_name("cpu", info)
    info.write_text("model name\t: " + "x" * 500 + "\n")
    assert len(device_name("cpu", info)) == MAX_CHARACTERS

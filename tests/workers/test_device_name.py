"""A worker registers with what it computes on."""

from pdserve.executor.device_names import MAX_CHARACTERS, device_name

INFO = "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n"


def test_a_cpu_is_named_by_its_model_and_the_interpreter_apart() -> None:
    assert device_name("cpu", INFO) == device_name("auto", INFO) == "Fast CPU @ 3 GHz"
    assert device_name("interpreter", INFO) == "interpreter, Fast CPU @ 3 GHz"


def test_a_cpu_without_a_model_name_has_some_name() -> None:
    assert device_name("cpu", "")
    assert len(device_name("cpu", "model name\t: " + "x" * 500 + "\n")) == MAX_CHARACTERS

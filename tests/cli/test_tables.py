"""Tables fit where they are printed, and never cut a header."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cluster_states import printed
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.status import render
from pdserve.measure import tables
from pdserve.measure.tables import Comparison
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

Command = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("width", range(10, 120, 7))
def test_no_header_is_ever_cut(width: int) -> None:
    for shown in (
        render(admin.ClusterStatus()),
        Comparison("", ["16x32x128"] * 9, [("TTFT p50 ms", ["1.0"] * 9)]),
    ):
        assert "…" not in printed(shown, width)


def test_runs_that_do_not_all_fit_beside_each_other_get_tables_below_each_other() -> None:
    rows = [(f"quantity {number}", [f"{number}.{run}" for run in range(9)]) for number in range(9)]
    text = printed(Comparison("", [f"run {run}" for run in range(9)], rows), 40)
    assert text.count("quantity 8") == 3
    assert all(f"{number}.{run}" in text.split() for run in range(9) for number in range(9))


WORDS = st.text("abcdefgh", min_size=1, max_size=12)
NAMES = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)  # up to a hundred columns: most do not fit as they are
CELLS = st.one_of(NAMES, st.sampled_from(["-", "0.25 / 0.5 / 0.75 / 1 ms", "3 OK, 1 UNAVAILABLE"]))


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    runs = draw(st.lists(NAMES, min_size=1, max_size=20))
    names = draw(st.lists(NAMES, max_size=12, unique=True))
    cells = st.lists(CELLS, min_size=len(runs), max_size=len(runs)) | CELLS.map(lambda cell: [cell] * len(runs))
    return Comparison(draw(NAMES), runs, [(name, draw(cells)) for name in names])


@settings(deadline=None)
@given(table=comparisons(), width=st.integers(40, 160))
def test_no_table_has_a_line_over_the_width_or_loses_a_word(table: Comparison, width: int) -> None:
    text = printed(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    kept = Counter(text.replace(";", " ").replace(":", " ").split())
    said = [table.title, *table.runs, *(word for name, cells in table.rows for word in (name, *set(cells)))]
    lost = {word for text in said for word in text.replace(":", " ").split()} - kept.keys()
    assert not lost


def test_the_status_of_a_worker_fits_on_a_line_of_a_small_terminal() -> None:
    load = link.Heartbeat(pages_free=20_000, pages_cached=9_999, num_running=256)
    told = link.Register(worker_id="prefill-0", role=link.ROLE_PREFILL, ready=True)
    text = printed(render(admin.ClusterStatus(workers=[admin.WorkerStatus(registration=told, load=load)])), 80)
    assert "prefill-0  prefill  ready  20000 / 9999 / 0 / 0 / 0  256 / 0" in " ".join(text.split(" " * 3))


def test_output_that_is_no_terminal_has_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert tables.output().width == 100
    monkeypatch.setenv("COLUMNS", "90")
    assert tables.output().width == 90


SIM = ("sim", "--prefill", "0", "--decode", "1", "--request-rate", "1", "--num-prompts", "100", "--workload", "64x8")


def test_json_goes_to_standard_output_alone_where_it_is_asked_for(pdserve: Command) -> None:
    ended = pdserve(*SIM, "--json", "-")
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["points"][0]["num_requests"] == 100


def test_json_goes_to_a_file_beside_the_table(pdserve: Command, tmp_path: Path) -> None:
    ended = pdserve(*SIM, "--json", str(tmp_path / "found.json"))
    assert "rate per gpu" in ended.stdout
    assert json.loads((tmp_path / "found.json").read_text())["points"]


@pytest.mark.parametrize("command", [
    SIM,
    ("plan", "--gpus", "1"),
    ("bench", "load", "--workload", "1x2x3"),
    ("bench", "agents"),
    ("bench", "accuracy", "no-model"),
    ("bench", "overload", "no-model"),
    ("bench", "chaos", "no-model"),
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    pdserve: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "nowhere" / "found.json"
    ended = pdserve(*command, "--json", str(path))
    assert ended.returncode == 2
    assert ended.stderr == f"pdserve: --json: cannot write {path}: No such file or directory\n"
    assert (
        pdserve(*command, "--json", str(tmp_path)).stderr
        == f"pdserve: --json: cannot write {tmp_path}: Is a directory\n"
    )


def test_whether_a_file_can_be_written_is_found_out_without_touching_it(pdserve: Command, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    assert pdserve("sim", "--workload", "infx10", "--json", str(kept)).returncode == 2
    assert kept.read_text() == "kept"
    assert pdserve("sim", "--workload", "infx10", "--json", str(tmp_path / "other")).returncode == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("text", "said"), [
    ("infx10", "inf tokens"), ("10xnan", "nan tokens"), ("0x5", "0 tokens"), ("5x1e9", "1e+09 tokens"),
    ("5x5~inf", "a spread of inf"), ("5x5~-1", "a spread of -1"),
])  # fmt: skip
@pytest.mark.parametrize("command", [("sim",), ("plan", "--gpus", "1"), ("bench", "accuracy", "no-model")])
def test_lengths_that_cannot_be_are_refused_in_one_line(
    pdserve: Command, command: tuple[str, ...], text: str, said: str
) -> None:
    ended = pdserve(*command, "--workload", text)
    assert ended.returncode == 2
    assert ended.stderr.startswith("pdserve: --workload:")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_what_too_few_requests_cannot_tell_is_said_in_one_line(pdserve: Command) -> None:
    ended = pdserve("sim", "--workload", "16x2", "--num-prompts", "20")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "not settled at any rate; --num-prompts allows more" in ended.stderr


def test_a_report_has_the_table_and_the_plot_and_is_refused_before_anything_runs(
    pdserve: Command, tmp_path: Path
) -> None:
    assert pdserve(*SIM, "--html", str(tmp_path / "report.html")).returncode == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "rate per gpu" in text
    assert "<h3>Attainment</h3>" in text
    assert "Where the time of requests went" not in text
    path = tmp_path / "nowhere" / "report.html"
    ended = pdserve(*SIM, "--html", str(path))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"pdserve: --html: cannot write {path}: No such file or directory\n"


def test_a_trace_that_is_not_there_is_named_once(pdserve: Command) -> None:
    assert pdserve("sim", "--workload", "gone.csv").stderr == "pdserve: gone.csv: No such file or directory\n"

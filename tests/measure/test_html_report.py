"""The report of load runs, as a file and as geometry."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdserve.measure.client import Door
from pdserve.measure.html_report import (
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    plot,
    shares,
    stepped,
    timeline,
    write_report,
)
from pdserve.measure.load import Run
from pdserve.measure.outcomes import ANY, OK, Objective, Outcome

STAGES = ("received", "tokenized", "admitted", "placed", "prefill_queued", "prefill_started", "prefill_done")


def outcome(number: int) -> Outcome:
    sent_s = 0.1 * number
    stages_s = {name: 0.001 * place for place, name in enumerate((*STAGES, "first_token", "finished"))}
    made = Outcome(sent_s, 8, 4, number=number, status=OK, ended_s=sent_s + 0.2, stages_s=stages_s)
    for token in range(4):
        made.take(1, sent_s + 0.01 * (token + 1) * (number + 1))
    return made


def run(name: str, rate_per_s: float | None, count: int = 20) -> Run:
    outcomes = [outcome(number) for number in range(count)]
    return Run(name, rate_per_s, f"{name} {rate_per_s}", Door.GRPC, Objective(0.1), [outcomes])


class Checked(HTMLParser):
    """Fails where elements are not closed in order, or load anything."""

    VOID = ("meta", "line", "rect", "circle", "polyline", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "srcset"} & dict(attrs).keys()
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def written(path: Path, *runs: Run) -> tuple[str, Checked]:
    write_report(path, "<b>mine</b>", runs, Objective(0.1))
    text, parser = path.read_text(encoding="utf-8"), Checked()
    parser.feed(text)
    assert parser.open == []
    return text, parser


def test_a_workload_may_be_sent_twice_at_one_rate(tmp_path: Path) -> None:
    runs = run("w", 2.0), run("w", 1.0, 10), run("w", 1.0, 20)
    assert "Goodput" in written(tmp_path / "report.html", *runs)[0]


def test_a_report_is_one_sound_file_that_loads_nothing(tmp_path: Path) -> None:
    text, parser = written(tmp_path / "report.html", *(run("w", rate) for rate in (1.0, 2.0, 4.0)))
    assert len(text) < 1_500_000
    assert "<b>" not in text
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "prefers-color-scheme: dark" in text
    for title in ("Goodput", "Attainment", "Time to first token", "Mean time per later token"):
        assert f"<h3>{title}</h3>" in text
    assert "request 3, 8 + 4 tokens: prefill, 1 ms</title>" in text


def test_one_rate_alone_has_no_plot_over_the_rate(tmp_path: Path) -> None:
    text, _ = written(tmp_path / "report.html", run("w", 1.0), run("v", None))
    assert "<h3>Goodput</h3>" not in text
    assert "<h3>Time to first token</h3>" in text


def test_a_run_of_failures_is_reported_too(tmp_path: Path) -> None:
    failed = [Outcome(0.0, 8, 4, status="UNAVAILABLE", ended_s=1.0) for _ in range(2)]
    written(tmp_path / "report.html", Run("w", 1.0, "w", Door.GRPC, ANY, [failed]))


def test_points_lie_where_the_axes_say() -> None:
    made = plot("t", ("x", "y"), [Line("a", [(0.0, 0.0), (10.0, 50.0)])], y_end=100.0, has_marks=True)
    bottom = HEIGHT - 44
    assert made.places(made.lines[0]) == [(LEFT, bottom), (WIDTH - RIGHT, pytest.approx((TOP + bottom) / 2))]


@pytest.mark.parametrize("end", [0.003, 0.7, 1.0, 9.0, 47.0, 1013.0])
def test_an_axis_has_a_few_round_numbers(end: float) -> None:
    ticks = Axis("x", end, 100).ticks
    assert 3 <= len(ticks) <= 8
    assert all(0 <= place <= 100.001 and float(text) <= end * 1.0001 for place, text in ticks)


def test_shares_rise_to_the_99th_percentile() -> None:
    found = shares(range(1, 1001))
    assert found[-1] == (990, 99.0)
    assert found == sorted(found)
    assert len(found) <= 111
    assert shares([]) == []
    assert shares([5.0]) == [(5.0, 100.0)]


def test_a_timeline_names_each_part_once() -> None:
    made = timeline("t", "ms", [("r", [("a", 0.0, 1.0), ("b", 1.0, 3.0)]), ("q", [("a", 0.0, 2.0)])])
    assert made.names == ["a", "b"]
    assert made.x.end == 3.0


def test_a_stepped_line_keeps_each_value_until_the_next() -> None:
    assert stepped([(0.0, 1.0), (5.0, 2.0), (8.0, 2.0)]) == [(0.0, 1.0), (5.0, 1.0), (5.0, 2.0), (8.0, 2.0), (8.0, 2.0)]
    assert stepped([]) == []

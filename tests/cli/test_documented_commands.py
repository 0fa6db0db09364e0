"""Every command that the documents show is one that the command line takes, with these flags."""

import re
from pathlib import Path

import pytest
import typer.main

from lab.__main__ import app as lab
from pdserve.base.processes import DEVICE_EXIT_STATUS, DRAIN_TIMED_OUT_STATUS, STOP_SIGNALS, exit_status
from pdserve.cli.app import app
from pdserve.worker.watchdog import DISMISSED_EXIT_STATUS, HUNG_EXIT_STATUS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = {"pdserve": typer.main.get_command(app), "python -m lab": typer.main.get_command(lab)}
SHOWN = re.compile(
    rf"(?:^ {{4}}|`|\| )(?:PYTHONPATH=\S+ )?(?P<program>{'|'.join(PROGRAMS)}) (?P<words>[^`#|\n]*)", re.MULTILINE
)


def shown(text: str) -> list[tuple[str, list[str]]]:
    """Return the program and the words of each command, those on lines that a backslash continues included."""
    joined = re.sub(r"\\\n\s+", " ", text)
    return [(match["program"], match["words"].split("   ")[0].split()) for match in SHOWN.finditer(joined)]


def flags_of(program: str, words: list[str]) -> set[str]:
    """Return the flags that the command has whose name the words begin with."""
    command, default = PROGRAMS[program], "load"
    for word in words:
        commands = getattr(command, "commands", {})
        if word in commands:
            command = commands[word]
        else:
            break
    command = getattr(command, "commands", {}).get(default, command)
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_flags_that_a_page_shows_are_known(page: Path) -> None:
    for program, words in shown(page.read_text(encoding="utf-8")):
        given = {word.partition("=")[0].rstrip(".,;:)") for word in words if word.startswith("--")}
        assert given <= flags_of(program, words), f"{program} {' '.join(words)}"


def test_commands_are_found_in_the_pages() -> None:
    found = [words for page in PAGES for _, words in shown(page.read_text(encoding="utf-8"))]
    assert {"bench", "up", "sim", "plan", "moves", "versus"} <= {words[0] for words in found if words}
    assert sum(any(word.startswith("--") for word in words) for words in found) > 10


def test_the_table_of_exit_statuses_names_each_status_of_a_process() -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    table = page.partition("| exit status | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = (line.split("|")[1] for line in table.splitlines())
    shown_there = sorted(int(status) for row in rows for status in row.split(","))
    own = [DRAIN_TIMED_OUT_STATUS, HUNG_EXIT_STATUS, DEVICE_EXIT_STATUS, DISMISSED_EXIT_STATUS]
    assert shown_there == sorted([0, 1, 2, *own, *map(exit_status, STOP_SIGNALS)])

"""One thing has one flag: over all commands, no two names for what an operator says."""

import re
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import typer

from pdserve.cli.app import app

ALIKE = 0.4  # share of the words of two flags' help that both have
FILLERS = frozenset(
    "a an and as at be by can default each for from here in is it its no not of on or so that the to".split()  # noqa: SIM905
)
# Alike in their words, and yet two things.
DIFFERENT = {
    frozenset(("--internal-port", "--handoff-port")),  # a router's, for workers; a worker's, for other workers
    frozenset(("--metrics-port", "--handoff-port")),
    frozenset(("--health-port", "--handoff-port")),
    frozenset(("--port", "--handoff-port")),
    frozenset(("--http-host", "--dialect-host")),  # a router's; a worker's own
    frozenset(("--max-length", "--input-len")),  # where lengths are cut; a length
    frozenset(("--max-length", "--output-len")),
    frozenset(("--max-length", "--max-tokens")),  # of prompt and answer together; of one answer
    frozenset(("--stop", "--output-len")),
    frozenset(("--pool-grace-s", "--router-grace-s")),  # a router's, for workers; a frontend's, for routers
    frozenset(("--frontend-id", "--router-id")),
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's, of a version typer chooses
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, (*path, name))
    if not hasattr(group, "commands"):
        yield " ".join(path), group


def flags(command: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the help of each flag, by its first long name."""
    long = {each: [name for name in each.opts if name.startswith("--")] for each in command.params}
    return {names[0]: each.help or "" for each, names in long.items() if names}


FLAGS = {path: flags(command) for path, command in commands(typer.main.get_command(app))}


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z']{2,}", text.partition("(default")[0].lower())) - FILLERS


def alike(one: str, other: str) -> float:
    return len(words(one) & words(other)) / max(1, len(words(one) | words(other)))


def test_all_commands_are_looked_at() -> None:
    assert {"up", "sim", "bench load", "autoscale simulate", "worker", "run-batch"} <= FLAGS.keys()


def test_help_names_no_flag_that_its_command_lacks() -> None:
    """Help that sends the reader to another command's flag means that the same thing has two names."""
    wrong = {
        (path, flag, named)
        for path, helps in FLAGS.items()
        for flag, text in helps.items()
        for named in re.findall(r"--[a-z][a-z-]+", text)
        if named not in helps
    }
    assert not wrong


def test_flags_of_different_commands_with_like_help_have_one_name() -> None:
    """Two flags of one command are two things. Two that never meet, and whose help says the same, are one."""
    helps: dict[str, set[str]] = {}
    for each in FLAGS.values():
        for flag, text in each.items():
            helps.setdefault(flag, set()).add(text)
    together = {frozenset(pair) for each in FLAGS.values() for pair in combinations(each, 2)}
    apart = {frozenset(pair) for pair in combinations(helps, 2)} - together - DIFFERENT
    found = {pair: max(alike(*texts) for texts in product(*(helps[flag] for flag in pair))) for pair in apart}
    assert not {tuple(sorted(pair)): share for pair, share in found.items() if share >= ALIKE}

"""What an autoscaler decided last is shown beside its policy, and by itself with what went before."""

import json
from pathlib import Path

import pytest
from cluster_states import cluster_state
from typer.testing import CliRunner

from pdserve.autoscaler.decisions import Add, Binds, Decision
from pdserve.autoscaler.journal import Journal
from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.cli.app import app
from pdserve.launch.folder import RECORD_FILE, state_file

POLICY = Path(__file__).resolve().parents[2] / "deploy" / "policies" / "local.yaml"
DECISION = Decision(Role.DECODE, Add("decode-2", Role.DECODE), 2, 3, Binds.STEP_TIME, "4.2 requests/s", "97%")


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Let a cluster named c run here, and return its autoscaler's journal."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = state_file("c")
    path.parent.mkdir(parents=True)
    path.write_text(cluster_state(path.with_name("secret")).model_dump_json(), encoding="utf-8")
    return Journal(path.with_name(RECORD_FILE), POLICY)


def run(*words: object) -> str:
    return CliRunner().invoke(app, ["autoscale", *map(str, words)], catch_exceptions=False).output


def test_the_last_decision_is_shown_below_what_the_policy_does(journal: Journal) -> None:
    plain = run("explain", POLICY)
    journal.write([DECISION])
    head, _, last = run("explain", POLICY, "--name", "c").removeprefix(plain).partition("\n")
    assert head == f"The autoscaler of c follows {POLICY}."
    assert last.endswith(f": {DECISION.text}\n")
    assert "97%" in last


def test_status_shows_what_was_noted_and_the_last_decision(journal: Journal) -> None:
    journal.note("decode-1 was added")
    journal.write([DECISION])
    noted, last = run("status", "--name", "c").splitlines()
    assert noted.endswith(" decode-1 was added")
    assert last.endswith(DECISION.text)
    assert [pool["desired"] for pool in json.loads(run("status", "--name", "c", "--json"))["pools"]] == [3]


def test_decisions_go_on_where_they_cannot_be_written(tmp_path: Path) -> None:
    Journal(tmp_path / "gone" / RECORD_FILE, POLICY).write(())


def test_without_an_autoscaler_there_is_nothing_to_show(journal: Journal) -> None:
    with pytest.raises(ConfigError, match="no autoscaler runs for this cluster"):
        run("status", "--name", "c")


def test_a_record_that_cannot_be_read_is_not_taken_for_none(journal: Journal) -> None:
    path = state_file("c").with_name(RECORD_FILE)
    path.mkdir()
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: Is a directory"):
        run("status", "--name", "c")

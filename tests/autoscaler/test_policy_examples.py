"""The policies that come with pdserve are valid, and the schema and the page beside them say what they may hold."""

from pathlib import Path

import pytest
from policy_table import rows
from typer.testing import CliRunner

from pdserve.autoscaler.explain import sentences
from pdserve.autoscaler.schema import Policy, json_schema, load
from pdserve.base.errors import ConfigError
from pdserve.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted((ROOT / "deploy" / "policies").glob("*.yaml"))


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["autoscale", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_there_is_a_policy_for_each_actuator() -> None:
    assert {load(path).actuator.kind for path in POLICIES} == {"process", "ray", "kubernetes", "publish"}
    assert run("validate", *POLICIES) == "".join(f"{path}: valid\n" for path in POLICIES)


def test_a_policy_whose_trace_cannot_be_read_is_not_valid(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "policies" / "local.yaml").read_text(encoding="utf-8")
    path = tmp_path / "policy.yaml"
    path.write_text(text.replace("{kind: kalman}", "{kind: kalman, warmupTrace: none.csv}"))
    with pytest.raises(ConfigError, match=r"none.csv: No such file"):
        run("validate", path)
    path.write_text(text.replace("{kind: kalman}", "{kind: kalman, warmupTrace: azure-code}"))
    run("validate", path)


def test_the_schema_kept_beside_them_is_current() -> None:
    kept = (ROOT / "deploy" / "policies" / "schema.json").read_text(encoding="utf-8")
    assert kept == json_schema(), "pdserve autoscale schema > deploy/policies/schema.json"
    assert run("schema") == kept


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_that_is_written_out_is_the_same(path: Path) -> None:
    policy = load(path)
    assert Policy.model_validate(policy.model_dump(by_alias=True, mode="json"), by_name=False) == policy


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_editors_find_the_schema(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=schema.json\n")


def explained(pools: dict[str, object] | None = None, **given: object) -> str:
    pool = {"maxReplicas": 4, **(pools or {})}
    document = {
        "apiVersion": "pdserve/v1alpha1",
        "kind": "AutoscalingPolicy",
        "objectives": {"ttftMs": 500, "tpotMs": 50},
        "budget": {"maxDevices": 8},
        "pools": {"prefill": pool, "decode": pool},
        **given,
    }
    return "\n".join(sentences(Policy.model_validate(document)))


NIGHT = {"daysOfWeek": ["Fri"], "start": "22:00", "end": "06:00", "minReplicas": 2, "maxReplicas": 3}


@pytest.mark.parametrize(
    ("pools", "given", "sentence"),
    [
        ({}, {}, "within 500 ms, and later ones within 50 ms each on average. 95% of all requests"),
        ({}, {"budget": {"maxDevices": 9, "minDevices": 3}}, "hold at most 9 devices, and at least 3."),
        ({}, {"interval": {"forecast": "90s", "react": "500ms"}}, "Every 1m30s each pool is sized for quantile 0.6 of"),
        ({}, {"interval": {"forecast": "90s", "react": "500ms"}}, "Every 500ms replicas are added if more comes"),
        ({}, {"forecaster": {"kind": "holt-winters", "season": "1d"}}, "(holt-winters with a season of 1d)"),
        (
            {},
            {"forecaster": {"horizon": "5m", "warmupTrace": "a.csv"}},
            "5m ahead (kalman, learnt from a.csv at first)",
        ),
        ({}, {}, "It has 1 to 4 replicas of 1 device."),
        ({"schedules": [NIGHT]}, {}, "From 22:00 to 06:00 the day after, on Fri (UTC): at least 2 and at most 3."),
        ({"schedules": [{**NIGHT, "daysOfWeek": ["Sat"], "end": "23:00"}]}, {}, "From 22:00 to 23:00, on Sat (UTC)"),
        ({"startup": "2h"}, {}, "serve 2h after its order"),
        ({"drainTimeout": "10m"}, {}, "not ended after 10m"),
        ({"signals": [{"metric": "kv_usage", "target": 0.8}]}, {}, "if more than 80% of its KV tokens are in use."),
        ({}, {}, "above what it is sized for, by at most 4 replicas in 15s or 100% in 15s, whichever is more."),
        ({"behavior": {"scaleUp": {"selectPolicy": "Min"}}}, {}, "100% in 15s, whichever is less."),
        ({"behavior": {"scaleUp": {"stabilizationWindowSeconds": 60}}}, {}, ", and only as far as was wanted for 1m,"),
        ({"behavior": {"scaleUp": {"selectPolicy": "Disabled"}}}, {}, "It never grows by itself."),
        ({"behavior": {"scaleDown": {"selectPolicy": "Disabled"}}}, {}, "It never shrinks by itself."),
        (
            {"behavior": {"scaleDown": {"tolerance": 0.25}}},
            {},
            "done for all of 5m, with 25% more demand, by at most 100%",
        ),
        ({}, {}, "Without fresh metrics it keeps its size."),
        ({"fallback": {"replicas": 2}}, {}, "and after 15s grows to 2 if it is smaller."),
        ({"costPerReplicaHour": 2.5}, {}, "It costs 2.5 to 10 an hour, 2.5 a replica."),
        ({}, {"roleSwitch": {"minDwell": "5m"}}, "5m after its last change at the earliest."),
        ({}, {"roleSwitch": {"minDwell": "5m"}}, "does not undo a change for 5m;"),
        ({}, {"roleSwitch": {"enabled": False}}, "Workers keep their roles."),
        ({}, {"mode": "advisory"}, "Nothing is carried out (mode: advisory)"),
        (
            {},
            {"actuator": {"kind": "ray"}},
            "actors of Ray's namespace pdserve, with 1 GPU for each device; Ray's auto",
        ),
        ({}, {"actuator": {"kind": "publish"}}, "Nothing is carried out: the sizes are published"),
    ],
)
def test_a_policy_is_explained_in_plain_sentences(
    pools: dict[str, object], given: dict[str, object], sentence: str
) -> None:
    assert sentence in explained(pools, **given)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_command_prints_what_the_policy_does(path: Path) -> None:
    assert run("explain", path).splitlines() == list(sentences(load(path)))


def test_the_page_explains_every_field() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert "\n".join(rows()) in page, "replace the table by what tests/support/policy_table.py prints"

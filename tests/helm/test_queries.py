"""Dashboards, alerts and triggers ask for metrics that processes show, in words that Prometheus understands."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helm_chart import CHART, of_kind, rendered
from promql_parser import parse
from shown_metrics import SHOWN

from pdserve.observe.metrics import Kind, Metric

RULES = CHART / "files" / "rules.yaml"
_SUFFIXES = {Kind.GAUGE: ("",), Kind.COUNTER: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
# By Prometheus: where a series comes from, the label of its pod that monitors take over, and the bucket of a histogram.
_ADDED = {"namespace", "pod", "pdserve_dev_model", "le"}


def _queries() -> Iterator[tuple[str, str]]:
    for file in sorted((CHART / "files" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield f"rules: {rule.get('alert', rule.get('record'))}", rule["expr"]
    for follow in ("desired", "waiting"):
        for scaled in of_kind(
            rendered({"autoscaling.by": "keda", "autoscaling.follow": follow}), "ScaledObject"
        ).values():
            yield f"keda: {follow}", scaled["spec"]["triggers"][0]["metadata"]["query"]


QUERIES = list(_queries())
METRICS: dict[str, Metric] = {
    metric.name + suffix: metric for shown in SHOWN.values() for metric in shown for suffix in _SUFFIXES[metric.kind]
}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}|\b((?!pdserve_dev_model)(?:pdserve|vllm)[\w:]*)")


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_query_is_understood_and_asks_for_metrics_and_labels_that_are_shown(where: str, query: str) -> None:
    parse(query)
    asked = [
        (match[1] or match[3], re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[2] or ""))
        for match in _SELECTOR.finditer(query)
    ]
    assert asked, where
    for name, labels in asked:
        assert set(labels) <= {*METRICS[name].labels, *_ADDED}, where


def test_labels_that_queries_group_by_are_those_of_their_metrics() -> None:
    for where, query in QUERIES:
        names = [match[1] or match[3] for match in _SELECTOR.finditer(query)]
        known = {label for name in names for label in METRICS[name].labels} | _ADDED
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            assert {label.strip() for label in grouped.split(",") if label.strip()} <= known, where


def test_rules_add_up_no_series_of_two_models() -> None:
    """So that one model without workers is not hidden by another one's."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        aggregations = re.findall(r"\b(?:sum|min|max|avg|count)\b(?: by \(([^)]*)\))?", rule["expr"])
        assert aggregations, rule
        for labels in aggregations:
            assert {"pod", "pdserve_dev_model"} & {*re.split(r",\s*", labels)}, rule


def test_prometheus_takes_the_rules_and_every_query(tmp_path: Path) -> None:
    """With promtool where the machine has it; every expression has been parsed above."""
    promtool = shutil.which("promtool")
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert all(rule["labels"]["severity"] in {"warning", "critical"} for rule in alerts)
    assert all(rule["annotations"]["summary"] for rule in alerts)
    asked = [{"record": f"query:{number}", "expr": query} for number, (_, query) in enumerate(QUERIES)]
    queries = tmp_path / "queries.yaml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": asked}]}), encoding="utf-8")
    for file in (RULES, queries):
        if promtool is not None:
            subprocess.run([promtool, "check", "rules", str(file)], check=True, timeout=60, cwd=tmp_path)

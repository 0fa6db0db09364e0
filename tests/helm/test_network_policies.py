"""Network policies let through what the parts of a cluster need of each other, and nothing else."""

from typing import Any

import pytest
from helm_chart import Manifest, of_kind, pods, rendered

PARTS = ("router", "frontend", "prefill", "decode", "autoscaler", "test")
FRONTENDS = {"frontends.replicas": 1}
UCX = range(50060, 50076)
ASKED = [{"port": 50051}, {"port": 8000}]  # by clients


def _selects(selector: Manifest, part: str) -> bool:
    labels = {
        "app.kubernetes.io/name": "pdserve",
        "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/component": part,
    }
    listed = all(labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", []))
    return listed and selector.get("matchLabels", {}).items() <= labels.items()


def _rules(policies: list[Manifest], part: str, way: str) -> list[Manifest]:
    """Return what may come to a part, or go from it; it must be closed by some policy."""
    mine = [each["spec"] for each in policies if _selects(each["spec"]["podSelector"], part)]
    assert any(way.capitalize() in each["policyTypes"] for each in mine), f"{part}: {way} is open"
    return [rule for each in mine for rule in each.get(way, [])]


def _lets(rules: list[Manifest], peers: str, part: str, port: int) -> bool:
    return any(
        any(
            _selects(peer["podSelector"], part)
            for peer in rule.get(peers, [])
            if "podSelector" in peer and "namespaceSelector" not in peer
        )
        and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        for rule in rules
    )


def _may(policies: list[Manifest], caller: str, listener: str, port: int) -> bool:
    leaves = _lets(_rules(policies, caller, "egress"), "to", listener, port)
    arrives = any(
        "from" not in rule and any(each["port"] == port for each in rule["ports"])
        for rule in _rules(policies, listener, "ingress")
    )
    return leaves and (arrives or _lets(_rules(policies, listener, "ingress"), "from", caller, port))


def _policies(**values: Any) -> list[Manifest]:  # noqa: ANN401 - values of the chart
    return list(of_kind(rendered({"networkPolicy.enabled": True, **values}), "NetworkPolicy").values())


@pytest.mark.parametrize(
    ("values", "calls"),
    [
        ({}, {("test", "router", 50051)}),
        (FRONTENDS, {("test", "frontend", 50051), ("frontend", "router", 50052)}),
    ],
    ids=["routers serve", "frontends serve"],
)
def test_each_part_reaches_the_ports_that_it_calls_and_no_others(
    values: Manifest, calls: set[tuple[str, str, int]]
) -> None:
    workers, policies = {"prefill", "decode"}, _policies(**values)
    calls = calls | {(caller, "router", 50052) for caller in (*workers, "autoscaler")}
    calls |= {(one, other, port) for one in workers for other in workers for port in (50053, *UCX)}
    ports = (8000, 50050, 50051, 50052, 50053, 50054, *range(50059, 50077), 9464)
    found = {
        (caller, listener, port)
        for caller in PARTS
        for listener in PARTS
        for port in ports
        if _may(policies, caller, listener, port)
    }
    assert found == calls


def test_ucx_listens_on_the_ports_that_are_let_through() -> None:
    for pool in ("prefill", "decode"):
        environment = pods(rendered({}))[pool]["containers"][0]["env"]
        assert {"name": "UCX_TCP_PORT_RANGE", "value": f"{UCX[0]}-{UCX[-1]}"} in environment


@pytest.mark.parametrize(("values", "serving"), [({}, "router"), (FRONTENDS, "frontend")])
def test_clients_are_anybody_unless_some_are_named(values: Manifest, serving: str) -> None:
    def rules(policies: list[Manifest]) -> dict[str, list[Manifest]]:
        """Return what may come to the ports for clients, by part."""
        found = {part: [rule for rule in _rules(policies, part, "ingress") if rule["ports"] == ASKED] for part in PARTS}
        return {part: rules for part, rules in found.items() if rules}

    clients = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    assert rules(_policies(**values)) == {serving: [{"ports": ASKED}]}
    named = {**values, "networkPolicy.clients": clients}
    assert rules(_policies(**named)) == {serving: [{"ports": ASKED, "from": clients}]}


def test_nothing_leaves_the_cluster_where_models_are_on_a_volume() -> None:
    def outside(policies: list[Manifest], part: str) -> list[Manifest]:
        return [rule for rule in _rules(policies, part, "egress") if "to" not in rule]

    volume = {"model.source": "pvc", "model.pvc.claimName": "models", "model.path": "/models/m"}
    closed = {part: [] for part in PARTS if part != "autoscaler"}
    assert {part: outside(_policies(**volume, **FRONTENDS), part) for part in closed} == closed
    assert outside(_policies(), "decode") == [{"ports": [{"port": 443}]}]
    assert outside(_policies(**volume), "autoscaler") == [{"ports": [{"port": 443}, {"port": 6443}]}]


def test_there_are_none_where_they_are_turned_off() -> None:
    assert _policies(**{"networkPolicy.enabled": False}) == []

"""Workers of several pods are LeaderWorkerSets, whose pods find each other; what does not go with that is refused."""

from typing import Any

import pytest
import yaml
from chart_cases import CASES
from helm_chart import of_kind, pods, refusal, rendered, settings_of, templates_of
from kubernetes_schemas import problems

from pdserve.kubernetes.objects import NODES

VALUES, _ = CASES["two-nodes"]
IDENTITY = {"tls.identity": VALUES["tls.identity"]}


def test_a_worker_of_two_nodes_is_a_group_of_two_pods_and_a_replica_of_its_pool() -> None:
    manifests = rendered(VALUES)
    assert "chat-pdserve-decode" not in of_kind(manifests, "Deployment")
    spec = of_kind(manifests, "LeaderWorkerSet")["chat-pdserve-decode"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    for name in ("decode", "decode-node"):
        assert templates_of(manifests)[name]["metadata"]["annotations"][NODES] == "2"
    assert NODES not in templates_of(manifests)["prefill"]["metadata"]["annotations"]


def test_pods_of_a_group_find_each_other_with_the_same_port_secret_and_part() -> None:
    manifests = rendered(VALUES)
    first, other = (yaml.safe_load(settings_of(manifests, name)) for name in ("decode", "decode-node"))
    assert first["nnodes"] == first["tensor_parallel_size"] == 2
    for key in ("master_port", "secret_file", "identity_dir", "model", "log_level", "termination_message_file"):
        assert first[key] == other[key]
    arguments = pods(manifests)["decode-node"]["containers"][0]["args"]
    assert {"--master-addr=$(LWS_LEADER_ADDRESS)", "--node-rank=$(LWS_WORKER_INDEX)"} <= {*arguments}
    assert "--worker-id=$(POD_NAME).$(POD_UID)" in pods(manifests)["decode"]["containers"][0]["args"]
    assert "--worker-id=$(POD_NAME)" in pods(manifests)["prefill"]["containers"][0]["args"]
    mounted = [[each["name"] for each in pods(manifests)[name]["volumes"]] for name in ("decode", "decode-node")]
    assert mounted[0] == mounted[1]


def test_each_pod_of_a_group_has_devices_and_the_worker_a_rank_on_each() -> None:
    policy = {"autoscaling.policy": {"budget": {"maxDevices": 64}, "roleSwitch": {"enabled": False}}}
    manifests = rendered({**IDENTITY, **policy, "decode": {"nodes": 2, "devices": {"count": 4}}})
    for name in ("decode", "decode-node"):
        assert pods(manifests)[name]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    settings = yaml.safe_load(settings_of(manifests, "decode"))
    assert (settings["device"], settings["tensor_parallel_size"], settings["nnodes"]) == ("cuda", 8, 2)


def test_all_workers_of_a_cluster_keep_pages_alike_where_one_pool_has_groups() -> None:
    for values, kept in ((VALUES, "own"), ({}, None)):
        manifests = rendered(values)
        for pool in ("prefill", "decode"):
            assert yaml.safe_load(settings_of(manifests, pool)).get("rank_memory") == kept


def test_settings_of_a_worker_alone_are_not_given_to_its_further_pods() -> None:
    values, _ = CASES["two-nodes-hpa"]
    manifests = rendered(values)
    assert yaml.safe_load(settings_of(manifests, "decode"))["tensor_parallel_size"] == 4
    assert "--seed=1" in pods(manifests)["decode"]["containers"][0]["args"]
    assert "--seed=1" not in pods(manifests)["decode-node"]["containers"][0]["args"]


@pytest.mark.parametrize(("config", "wait_s"), [({}, 900), ({"join_timeout_s": 77}, 77)])
def test_pods_of_a_group_wait_for_each_other_as_long_as_a_start_may_take(config: dict[str, Any], wait_s: int) -> None:
    manifests = rendered({**VALUES, "decode": {"nodes": 2, "startupTimeoutSeconds": 900, "config": config}})
    for name in ("decode", "decode-node"):
        assert yaml.safe_load(settings_of(manifests, name))["join_timeout_s"] == wait_s
    assert "join_timeout_s" not in yaml.safe_load(settings_of(manifests, "prefill"))


@pytest.mark.parametrize("by", ["hpa", "keda"])
def test_what_scales_a_pool_of_groups_scales_their_set(by: str) -> None:
    manifests = rendered({**VALUES, "autoscaling": {"by": by}})
    kind = "HorizontalPodAutoscaler" if by == "hpa" else "ScaledObject"
    target = of_kind(manifests, kind)["chat-pdserve-decode"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "chat-pdserve-decode",
    }
    assert "replicas" not in of_kind(manifests, "LeaderWorkerSet")["chat-pdserve-decode"]["spec"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({**VALUES, "autoscaling.by": "pdserve"}, "decode.nodes: must be 1 where autoscaling.by is pdserve"),
        ({"decode.nodes": 2}, "tls.identity.from: must be secret or certManager where workers have several nodes"),
        (
            {**IDENTITY, "decode": {"nodes": 12, "strategy": {"type": "Recreate"}}},
            "decode.strategy.type: must be RollingUpdate where nodes is over 1",
        ),
        (
            {**IDENTITY, "decode": {"nodes": 2, "strategy": {"rollingUpdate": {"maxUnavailable": 0}}}},
            "decode.strategy.rollingUpdate.maxSurge: must be over 0 where nodes is over 1 and maxUnavailable is 0",
        ),
        ({"decode.nodes": 65}, "nodes"),
        ({"router.nodes": 2}, "nodes"),
    ],
)
def test_what_does_not_go_with_several_pods_a_worker_is_refused(values: dict[str, Any], why: str) -> None:
    assert why in refusal(values)


def test_pods_of_a_group_reach_each_other_and_no_pod_of_another_pool_does() -> None:
    policies = of_kind(rendered({**VALUES, "networkPolicy.enabled": True}), "NetworkPolicy")
    assert "chat-pdserve-prefill-nodes" not in policies
    spec = policies["chat-pdserve-decode-nodes"]["spec"]
    assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    peers = [{"podSelector": spec["podSelector"]}]
    ports = [{"port": 1024, "endPort": 65535}]
    assert spec["ingress"] == [{"from": peers, "ports": ports}]
    assert spec["egress"] == [{"to": peers, "ports": ports}]


def test_the_schema_of_groups_refuses_what_it_does_not_know() -> None:
    group = of_kind(rendered(VALUES), "LeaderWorkerSet")["chat-pdserve-decode"]
    assert problems(group, "1.31") == []
    wrong = {**group, "spec": {**group["spec"], "template": {}}}
    assert problems(wrong, "1.31")
    pod = {**group["spec"]["leaderWorkerTemplate"]["workerTemplate"]}
    pod["spec"] = {**pod["spec"], "container": []}
    template = {**group["spec"]["leaderWorkerTemplate"], "workerTemplate": pod}
    assert problems({**group, "spec": {**group["spec"], "leaderWorkerTemplate": template}}, "1.31")

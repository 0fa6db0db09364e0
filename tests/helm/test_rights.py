"""The operator's account may do what its code asks of Kubernetes, and nothing else."""

import pytest
from helm_chart import Manifest, rendered

from pdserve.kubernetes.objects import ACTUATOR, RESOURCE, WATCHER, Right

OWN = "llm"


def _granted(manifests: list[Manifest]) -> set[tuple[str, str, str, str]]:
    """Return what roles grant: verb, group, resource, and the namespace unless it is the release's own."""
    found = set()
    for role in manifests:
        if role["kind"] in {"Role", "ClusterRole"}:
            namespace = "*" if role["kind"] == "ClusterRole" else role["metadata"]["namespace"].replace(OWN, "")
            found |= {
                (verb, group, resource, namespace)
                for rule in role["rules"]
                for verb in rule["verbs"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
            }
    return found


def _asked(rights: tuple[Right, ...]) -> set[tuple[str, str, str, str]]:
    return {(verb, right.group, right.resource, right.namespace) for right in rights for verb in right.verbs}


@pytest.mark.parametrize(
    ("values", "rights"),
    [
        ({"autoscaling.by": "none"}, WATCHER),
        ({"autoscaling.by": "pdserve"}, WATCHER + ACTUATOR),
        ({"autoscaling.by": "pdserve", "autoscaling.policyAs": "AutoscalingPolicy"}, WATCHER + ACTUATOR + RESOURCE),
        ({"autoscaling.by": "none", "autoscaling.policyAs": "AutoscalingPolicy"}, WATCHER),
        ({"autoscaling.by": "hpa"}, WATCHER),
        ({"autoscaling.by": "keda", "autoscaling.follow": "waiting"}, WATCHER),
        ({"operator.watchNodes": False}, tuple(right for right in WATCHER if not right.namespace)),
    ],
)
def test_the_operator_may_do_what_it_does_and_no_more(values: Manifest, rights: tuple[Right, ...]) -> None:
    assert _granted(rendered(values)) == _asked(rights)


def test_scales_and_the_lease_are_named() -> None:
    rules = [
        rule for role in rendered({"autoscaling.by": "pdserve"}) if role["kind"] == "Role" for rule in role["rules"]
    ]
    named = {tuple(rule["resourceNames"]) for rule in rules if "resourceNames" in rule}
    assert named == {("chat-pdserve-prefill", "chat-pdserve-decode"), ("chat-pdserve-autoscaler",)}
    free = [
        rule for rule in rules if "resourceNames" not in rule and not {"create", "list", "watch"} & {*rule["verbs"]}
    ]
    assert [rule["resources"] for rule in free] == [["pods"], ["leases"]]  # pods to patch, and the leases of nodes


def test_every_binding_is_the_operators() -> None:
    for binding in rendered({"autoscaling.by": "pdserve"}):
        if binding["kind"].endswith("Binding"):
            assert [each["name"] for each in binding["subjects"]] == ["chat-pdserve-autoscaler"]

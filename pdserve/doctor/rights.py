"""Asks Kubernetes whether this process's account may do what an autoscaler, or a watcher of pods, does there."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pdserve.autoscaler.schema import KubernetesActuator
from pdserve.doctor.machine import Finding, failed, ok
from pdserve.errors import CommandError, ConfigError
from pdserve.kubernetes.objects import Object
from pdserve.kubernetes.rights import ACTUATOR, RESOURCE, WATCHER, Right

if TYPE_CHECKING:
    from pdserve.kubernetes.client import Client

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ASKED_WITHIN_S = 20.0
REMEDY = "install the chart, or bind the account to roles with these rights"


class _Verdict(Object, frozen=True):
    allowed: bool = False


class _Review(Object, frozen=True):
    status: _Verdict = _Verdict()


class Action(NamedTuple):
    """One call, as an access review asks for it. The account of a namespace may do more elsewhere."""

    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str  # empty: the whole cluster
    name: str  # empty: any object

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {what} {self.name}".strip() + (f" in {self.namespace}" if self.namespace else "")


def needed(
    actuator: KubernetesActuator | None, namespace: str, policy_resource: str | None = None
) -> tuple[Action, ...]:
    """Return what an autoscaler with this actuator does, or without one a watcher of pods in a namespace.

    `policy_resource`: the resource that holds its policy, namespace/name.
    """
    if actuator is None:
        found = [*_actions(WATCHER, namespace, {})]
    else:
        names = {"deployments": (actuator.prefill.name, actuator.decode.name), "leases": (actuator.lease,)}
        found = [*_actions((*WATCHER, *ACTUATOR), actuator.namespace, names)]
    if policy_resource is not None:
        where, _, name = policy_resource.partition("/")
        found += _actions(RESOURCE, where, {"autoscalingpolicies": (name,)})
    return tuple(dict.fromkeys(found))


def _actions(rights: Iterable[Right], namespace: str, names: Mapping[str, tuple[str, ...]]) -> Iterator[Action]:
    for right in rights:
        resource, _, subresource = right.resource.partition("/")
        where = {"": namespace, "*": ""}.get(right.namespace, right.namespace)
        for verb in right.verbs:
            named = verb != "create" and where == namespace  # a name cannot limit who creates
            for name in names.get(resource, ("",)) if named else ("",):
                yield Action(verb, right.group, resource, subresource, where, name)


def rights_findings(allowed: Mapping[Action, bool]) -> Iterator[Finding]:
    denied = [action for action, may in allowed.items() if not may]
    for action in denied:
        yield failed("rights", f"this account may not {action}", REMEDY)
    if not denied:
        yield ok("rights", f"this account may do all {len(allowed)} things that are asked of Kubernetes")


async def gather_rights(actuator: KubernetesActuator | None, policy_resource: str | None = None) -> list[Finding]:
    from pdserve.kubernetes.client import Client  # noqa: PLC0415 - its packages are an extra

    try:
        async with Client() as client, asyncio.timeout(ASKED_WITHIN_S):
            actions = needed(actuator, client.namespace or "default", policy_resource)
            return [*rights_findings({action: await _may(client, action) for action in actions})]
    except (CommandError, ConfigError, TimeoutError) as error:
        seen = str(error) or f"no answer within {ASKED_WITHIN_S:g} s"
        return [failed("rights", seen, "see that the pod has a service account token, and that it reaches the API")]


async def _may(client: "Client", action: Action) -> bool:
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in action._asdict().items() if value}},
    }
    return (await client.create(REVIEWS, body, _Review)).status.allowed

"""Checks of what a process's configuration names: the model, certificates, the secret, a policy and its rights.

The rights are those that an autoscaler, or a watcher of pods, needs on Kubernetes, which is asked for each.
"""

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict

from pdserve.autoscaler.schema import KubernetesActuator, load
from pdserve.autoscaler.server import opened_resource
from pdserve.base.errors import CommandError, ConfigError
from pdserve.base.yaml_models import did_you_mean
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import check_model, open_checkpoint
from pdserve.doctor.machine import Finding, failed, ok, warning
from pdserve.kubernetes.objects import ACTUATOR, RESOURCE, WATCHER, Object, Right
from pdserve.net.certificates import read_identity, read_pair
from pdserve.net.rpc import read_secret

if TYPE_CHECKING:
    from pdserve.kubernetes.client import Client

ENOUGH_DAYS = 14.0  # that a certificate is to last
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ASKED_WITHIN_S = 20.0
RIGHTS_REMEDY = "install the chart, or bind the account to roles with these rights"


class Settings(BaseModel):
    """What of the configuration of a router, worker or autoscaler is looked at. None: not set."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: str | None = None
    secret_file: Path | None = None
    identity_dir: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    handoff_host: str = "127.0.0.1"
    handoff_rdma_devices: tuple[str, ...] = ()
    policy: Path | None = None  # an autoscaler's
    policy_resource: str | None = None  # namespace/name, in its place


def settings_findings(settings: Settings, now: datetime) -> Iterator[Finding]:
    if settings.secret_file is not None:
        try:
            read_secret(settings.secret_file)
            yield ok("secret", f"{settings.secret_file}")
        except ConfigError as error:
            yield failed("secret", str(error), "mount it as a file of mode 0440 or less, 32 bytes or more")
    if settings.identity_dir is not None:
        yield _identity(settings.identity_dir, now)
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        yield _public(settings.ssl_certfile, settings.ssl_keyfile, now)
    if settings.model is not None:
        yield model_finding(settings.model)


def _identity(folder: Path, now: datetime) -> Finding:
    try:
        identity = read_identity(folder)
    except ConfigError as error:
        return failed("identity", str(error), "issue certificates as docs/security.md describes")
    seen = f"{folder}: a {identity.part} of {identity.trust_domain}"
    return expiry_finding("identity", seen, identity.pair.expires, now)


def _public(certificate: Path, key: Path, now: datetime) -> Finding:
    try:
        pair = read_pair(certificate, key, ("ssl_certfile", "ssl_keyfile"))
    except ConfigError as error:
        return failed("public certificate", str(error), "issue a certificate for the name that clients use")
    return expiry_finding("public certificate", str(certificate), pair.expires, now)


def expiry_finding(name: str, seen: str, expires: datetime, now: datetime) -> Finding:
    days = (expires - now).total_seconds() / 86_400
    if days <= 0:
        return failed(name, f"{seen}, expired {abs(days):.0f} days ago", "renew it; files that change are read again")
    if days < ENOUGH_DAYS:
        return warning(name, f"{seen}, {days:.0f} days left", "renew it; files that change are read again")
    return ok(name, f"{seen}, {days:.0f} days left")


def model_finding(model: str) -> Finding:
    """Open a model's files, read its tokenizer and chat template, and see that its weights are there."""
    try:
        checkpoint = check_model(resolve_model(model), with_weights=False)
        for file in checkpoint.weight_files:
            with file.open("rb") as opened:
                opened.read(1)
    except (ConfigError, OSError) as error:
        return failed("model", str(error), "fetch it again, or give the path of a Hugging Face directory or GGUF file")
    if not checkpoint.weight_files:
        return failed("model", f"{checkpoint.path} holds no weights", "fetch its safetensors files")
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    return ok(
        "model", f"{checkpoint.name} at {checkpoint.path}: {len(checkpoint.weight_files)} files, {size / 2**30:.1f} GiB"
    )


def fingerprint_of(model: str) -> str:
    """Return what identifies a model's files, empty where they cannot be read. Reads all of them, once."""
    try:
        return open_checkpoint(resolve_model(model)).fingerprint
    except (ConfigError, OSError):
        return ""


def key_findings(keys: Iterable[str], known: Collection[str]) -> Iterator[Finding]:
    """Check that some process, or a cluster's file, has each key as a setting: none starts with others."""
    for key in keys:
        if key not in known:
            yield failed("config", f"{key}: unknown key{did_you_mean(key, known)}", "mend it: nothing starts with it")


async def resource_findings(policy_resource: str) -> list[Finding]:
    """Check an autoscaler's policy that Kubernetes holds, namespace/name, and the rights that it needs there."""
    try:
        async with opened_resource(policy_resource) as resource:
            return await policy_findings(resource.file, policy_resource)
    except ConfigError as error:
        return [failed("policy", str(error), "kubectl get asp, and grant this account `get` of it")]


async def policy_findings(policy: Path, policy_resource: str | None = None) -> list[Finding]:
    """Check an autoscaler's policy, and the rights that it needs on Kubernetes."""
    try:
        actuator = load(policy).actuator
    except ConfigError as error:
        return [failed("policy", str(error), "pdserve autoscale validate FILE")]
    found = [ok("policy", f"{policy_resource or policy}: {actuator.kind}")]
    if isinstance(actuator, KubernetesActuator):
        found += await _gather_rights(actuator, policy_resource)
    elif actuator.kind == "publish" and "KUBERNETES_SERVICE_HOST" in os.environ:
        found += await _gather_rights(None, policy_resource)
    return found


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


def _rights_findings(allowed: Mapping[Action, bool]) -> Iterator[Finding]:
    denied = [action for action, may in allowed.items() if not may]
    for action in denied:
        yield failed("rights", f"this account may not {action}", RIGHTS_REMEDY)
    if not denied:
        yield ok("rights", f"this account may do all {len(allowed)} things that are asked of Kubernetes")


async def _gather_rights(actuator: KubernetesActuator | None, policy_resource: str | None = None) -> list[Finding]:
    from pdserve.kubernetes.client import Client  # noqa: PLC0415 - its packages are an extra

    try:
        async with Client.connected() as client, asyncio.timeout(ASKED_WITHIN_S):
            actions = needed(actuator, client.namespace or "default", policy_resource)
            return [*_rights_findings({action: await _may(client, action) for action in actions})]
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

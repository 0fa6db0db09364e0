"""A policy as a custom resource: what its definition takes, and what its status shows."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml
from admin_stub import Router, serving
from kube_cluster import KubeCluster
from kube_definition import Definition
from policy_definition import definition

from pdserve.autoscaler.loop import Target
from pdserve.autoscaler.resource import PolicyResource
from pdserve.autoscaler.server import serve
from pdserve.base.errors import ConfigError
from pdserve.kubernetes.objects import RESOURCE
from pdserve.launch.folder import write_secret
from pdserve.settings.autoscaler import AutoscalerConfig

if TYPE_CHECKING:
    from pdserve.autoscaler.loop import Loop

POLICIES = Path(__file__).parents[2] / "deploy" / "policies"
PATH = "/apis/pdserve.dev/v1alpha1/namespaces"
KEYS_OF_STRUCTURE = {"$ref", "anyOf", "oneOf", "allOf", "not", "const", "default", "discriminator", "title", "$defs"}


def spec_schema() -> Any:  # noqa: ANN401
    (version,) = definition()["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]


def keys(schema: Any, *, are_names: bool = False) -> set[str]:  # noqa: ANN401
    """Return the keywords of a schema, not the names of its properties."""
    if isinstance(schema, list):
        return {key for each in schema for key in keys(each)}
    if not isinstance(schema, dict):
        return set()
    own = set() if are_names else set(schema)
    return own | {key for name, each in schema.items() for key in keys(each, are_names=name == "properties")}


def test_the_definition_is_structural_as_kubernetes_asks() -> None:
    assert keys(definition()["spec"]["versions"]) & KEYS_OF_STRUCTURE == set()
    text = json.dumps(spec_schema())
    assert '"null"' not in text
    assert '"additionalProperties": false' not in text


def test_each_column_of_kubectl_get_asp_is_a_field_of_its_type() -> None:
    (version,) = definition()["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        found = version["schema"]["openAPIV3Schema"]
        for name, of_list in re.findall(r"\.(\w+)(\[[^]]*\])?", column["jsonPath"]):
            found = found["properties"][name]
            found = found["items"] if of_list else found
        assert found["type"] == column["type"], column


@pytest.mark.parametrize("path", sorted(POLICIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_example_is_a_resource_too(path: Path) -> None:
    policy = yaml.safe_load(path.read_text(encoding="utf-8"))
    resource = {"spec": {key: value for key, value in policy.items() if key not in {"apiVersion", "kind"}}}
    defined = Definition(definition())
    assert defined.pruned(resource) == resource
    assert defined.problems(resource) == []
    resource["spec"]["budget"]["maxDevices"] = 0
    assert len(defined.problems(resource)) == 1


def spec() -> dict[str, Any]:
    return {
        "objectives": {"ttftMs": 1000, "tpotMs": 100},
        "budget": {"maxDevices": 6},
        "mode": "advisory",
        "interval": {"forecast": "10s", "react": "100ms"},
        "actuator": {"kind": "publish"},
        "pools": {"prefill": {"maxReplicas": 3}, "decode": {"maxReplicas": 3}},
    }


async def make_policy(kube: KubeCluster, others: dict[str, Any] | None = None) -> str:
    """Make the resource; return its path."""
    path, meta = f"{PATH}/{kube.namespace}/autoscalingpolicies", {"name": "chat"}
    head = {"apiVersion": "pdserve.dev/v1alpha1", "kind": "AutoscalingPolicy", "metadata": meta}
    await kube.ask("POST", path, {**head, "spec": spec() | (others or {})})
    return f"{path}/chat"


@pytest.mark.usefixtures("definition")
async def test_the_server_refuses_what_the_definition_does_not_allow(kube: KubeCluster) -> None:
    path = await make_policy(kube)
    for key, bad in (("maxReplicas", 0), ("maxReplicas", "many"), ("costPerReplicaHour", -1)):
        assert f"spec.pools.decode.{key}" in await kube.refusal(path, {"spec": {"pools": {"decode": {key: bad}}}})
    assert "spec.mode" in await kube.refusal(path, {"spec": {"mode": "auto"}})
    assert "maxDevices" in await kube.refusal(path, {"spec": {"budget": {"maxDevices": None}}})


@pytest.mark.usefixtures("definition")
async def test_the_status_shows_sizes_and_what_is_wrong_with_a_policy(
    kube: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.autoscaler.resource.LOOK_S", 0.05)
    path, secret = await make_policy(kube), write_secret(tmp_path)

    async def status(*wanted: str) -> Any:  # noqa: ANN401
        async with asyncio.timeout(30):
            while True:
                found = (await kube.ask("GET", path)).get("status", {})
                if all(text in json.dumps(found) for text in wanted):
                    return found

    settings = AutoscalerConfig(policy_resource=f"{kube.namespace}/chat", metrics=False)
    async with serving(Router(), secret) as address:
        task = asyncio.create_task(serve(settings, Target((address,), secret), lambda _: ()))
        found = await status('"status": "True"', "decode")
        assert found["decode"] == {"replicas": 0, "desired": 1, "binds": "minReplicas"}
        await kube.patch(path, {"spec": {"pools": {"decode": {"minReplicas": 9}}}})
        found = await status('"status": "False"')
        assert "pools.decode.minReplicas: 9 is above maxReplicas, 3" in found["conditions"][0]["message"]
        await kube.patch(path, {"spec": {"pools": {"decode": {"minReplicas": 2}}}})
        await status('"status": "True"', '"desired": 2')
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await kube.patch(path, {"spec": {"pools": {"decode": {"minReplicas": 4}}}})
        with pytest.raises(ConfigError, match="minReplicas: 4 is above"):
            await serve(settings, Target((address,), secret), lambda _: ())
    assert (await status("Refused"))["conditions"][0]["status"] == "False"
    if kube.double is not None:  # a real server has refused what the account may not do
        asked = {(call.verb, call.group, call.resource) for call in kube.double.calls if call.group == "pdserve.dev"}
        rights = {(verb, right.group, right.resource) for right in RESOURCE for verb in right.verbs}
        assert rights <= asked
        hand = {(verb, "pdserve.dev", "autoscalingpolicies") for verb in ("create", "list", "patch")}
        assert asked <= rights | hand


@pytest.mark.usefixtures("definition")
async def test_the_last_decision_stays_to_be_seen(
    kube: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.autoscaler.resource.LOOK_S", 0.5)  # five steps
    names = {role: {"name": f"chat-{role}"} for role in ("prefill", "decode")}
    for name in names.values():
        await kube.make_deployment(name["name"], replicas=1)
    actuator = {"kind": "kubernetes", "namespace": kube.namespace, "lease": "chat-autoscaler", **names}
    path = await make_policy(kube, {"mode": "enforce", "actuator": actuator})
    settings, secret = AutoscalerConfig(policy_resource=f"{kube.namespace}/chat", metrics=False), write_secret(tmp_path)
    async with serving(Router(), secret) as address, asyncio.timeout(20):
        task = asyncio.create_task(serve(settings, Target((address,), secret), lambda _: ()))
        for count in (2, 3):
            await kube.patch(path, {"spec": {"pools": {"decode": {"minReplicas": count}}}})
            seen = f"decode: add decode-{count - 2}; {count - 1} of {count} replicas; binds: minReplicas"
            while seen not in (await kube.ask("GET", path)).get("status", {}).get("lastDecision", ""):
                assert not task.done(), task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.usefixtures("definition")
async def test_a_second_term_shows_again_what_another_one_wrote_over(
    kube: KubeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.autoscaler.resource.LOOK_S", 0.01)
    path, terms, follows = await make_policy(kube), [True], asyncio.Event()
    loop = SimpleNamespace(file=SimpleNamespace(problem=""), decisions=(), last_orders="mine")

    def leads() -> bool:
        if not terms[-1]:
            follows.set()
        return terms[-1]

    async def until_shown() -> None:
        while (await kube.ask("GET", path)).get("status", {}).get("lastDecision") != "mine":
            pass

    async with (
        asyncio.timeout(20),
        PolicyResource.opened(f"{kube.namespace}/chat") as resource,
        resource.followed(cast("Loop", loop), leads),
    ):
        await until_shown()
        terms.append(False)
        await follows.wait()
        await kube.patch(f"{path}/status", {"status": {"lastDecision": "another's"}})
        terms.append(True)
        await until_shown()


def test_a_policy_is_named_once() -> None:
    for given in ({}, {"policy": Path("p"), "policy_resource": "a/b"}):
        with pytest.raises(ConfigError, match="either it or policy_resource is required"):
            AutoscalerConfig.model_validate(given)

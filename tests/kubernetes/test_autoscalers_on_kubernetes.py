"""Two whole autoscalers of one cluster: one decides, and the other follows it until it has ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from admin_stub import Router, serving
from kube_api import Fault
from kube_cluster import REAL, KubeCluster
from kube_stage import NAMES

from pdserve.autoscaler.loop import Target
from pdserve.autoscaler.server import serve
from pdserve.launch.folder import write_secret
from pdserve.settings.autoscaler import AutoscalerConfig

POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {{ttftMs: 1000, tpotMs: 100}}
budget: {{maxDevices: 6}}
interval: {{forecast: 10s, react: 100ms}}
actuator:
  kind: kubernetes
  namespace: {namespace}
  lease: chat-autoscaler
  prefill: {{name: chat-prefill}}
  decode: {{name: chat-decode}}
pools:
  prefill: {{minReplicas: 1, maxReplicas: 3}}
  decode: {{minReplicas: 2, maxReplicas: 3}}
"""
EVENTS = "/apis/events.k8s.io/v1/namespaces"


@asynccontextmanager
async def autoscaler(policy: Path, target: Target, folder: Path, port: int) -> AsyncIterator[asyncio.Task[None]]:
    settings = AutoscalerConfig(policy=policy, metrics_port=port, routers=target.routers)
    task = asyncio.create_task(serve(settings, target, lambda _: ()))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def leads(port: int) -> bool | None:
    """Return what an autoscaler shows of itself; None where it shows nothing yet."""
    async with httpx2.AsyncClient() as http:
        try:
            text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        except httpx2.HTTPError:
            return None
    shown = {line.split(" ")[0]: line.split(" ")[1] for line in text.splitlines() if not line.startswith("#")}
    is_first = shown["pdserve_autoscaler_leads"] == "1.0"
    assert is_first or not any(name.startswith("pdserve_desired_replicas") for name in shown)
    return is_first


async def test_a_secret_that_cannot_be_read_any_more_ends_nothing(tmp_path: Path) -> None:
    secret = write_secret(tmp_path)
    async with serving(Router(), secret) as address:
        target = Target((address,), secret)
        await target.statuses()
        secret.unlink()
        assert len(await target.statuses()) == 1


async def test_a_router_that_is_gone_keeps_no_decision_from_the_others(tmp_path: Path, unused_tcp_port: int) -> None:
    router, secret = Router(), write_secret(tmp_path)
    async with serving(router, secret) as address:
        await Target((f"127.0.0.1:{unused_tcp_port}", address), secret).report(["decode: add decode-1"])
    assert router.decisions == ["decode: add decode-1"]


async def test_one_of_two_autoscalers_decides_and_says_why_on_the_workload(
    kube: KubeCluster, tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    router, secret, policy = Router(), write_secret(tmp_path), tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(namespace=kube.namespace))
    for name in NAMES.values():
        await kube.make_deployment(name, replicas=1)
    async with serving(router, secret) as address:
        target = Target((address,), secret)
        ports = [unused_tcp_port_factory(), unused_tcp_port_factory()]
        async with autoscaler(policy, target, tmp_path, ports[0]) as first:
            async with asyncio.timeout(30):
                while await kube.size("chat-decode") < 2:
                    assert not first.done(), first
            async with autoscaler(policy, target, tmp_path, ports[1]) as second:
                async with asyncio.timeout(30):
                    while await leads(ports[1]) is None:
                        assert not second.done(), second
                assert [await leads(port) for port in ports] == [True, False]
                first.cancel()
                async with asyncio.timeout(30):
                    while not await leads(ports[1]):
                        assert not second.done(), second
    assert await kube.size("chat-decode") == 2
    events = (await kube.ask("GET", f"{EVENTS}/{kube.namespace}/events"))["items"]
    ours = [event for event in events if event.get("reportingController") == "pdserve.dev/autoscaler"]
    assert {(event["reason"], event["regarding"]["name"]) for event in ours} >= {("ScalingUp", "chat-decode")}
    assert "binds: minReplicas" in ours[0]["note"]


@pytest.mark.skipif(bool(REAL), reason="a fault")
async def test_while_the_api_is_gone_no_size_changes_and_then_the_policy_is_followed_as_it_is_by_then(
    kube: KubeCluster, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kubernetes.client.MAX_WAIT_S", 0.2)
    monkeypatch.setattr("pdserve.kubernetes.election.RENEW_WITHIN_S", 0.5)
    monkeypatch.setattr("pdserve.kubernetes.election.RETRY_S", 0.05)
    assert kube.double is not None
    secret, policy = write_secret(tmp_path), tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(namespace=kube.namespace))
    for name in NAMES.values():
        await kube.make_deployment(name, replicas=2)
    async with serving(Router(), secret) as address:
        target = Target((address,), secret)
        async with autoscaler(policy, target, tmp_path, unused_tcp_port) as running, asyncio.timeout(60):
            while not await leads(unused_tcp_port):
                assert not running.done(), running
            gone = Fault("ANY", "/", lose="request")
            kube.double.faults.append(gone)
            policy.write_text(policy.read_text().replace("decode: {minReplicas: 2", "decode: {minReplicas: 3"))
            num_left = gone.times - 20  # requests that are tried meanwhile
            while await leads(unused_tcp_port) or gone.times > num_left:
                assert not running.done(), running
            workloads = [item for (kind, *_), item in kube.double.objects.items() if kind == "deployments"]
            assert [item["spec"]["replicas"] for item in workloads] == [2, 2]
            kube.double.faults.clear()
            while await kube.size("chat-decode") < 3:
                assert not running.done(), running

"""Where frontends have replicas they serve the clients, and routers do not."""

from typing import Any

import pytest
import values_schema
import yaml
from helm_chart import Manifest, of_kind, pods, rendered

from pdserve.router.config import EndpointConfig, FrontendConfig, RouterConfig

FRONTENDS = {"frontends.replicas": 2}
OF_CLIENTS = {"host", "port", "http_host", "http_port", "ssl_certfile", "ssl_keyfile", "api_keys_file"}
HUB = {"model.source": "hub", "model.hub.repository": "some/model"}
PVC = {"model.source": "pvc", "model.pvc.claimName": "models", "model.path": "/models/m"}


def settings(manifests: list[Manifest], component: str) -> Manifest:
    """Return what a process is configured with, its flags included."""
    (text,) = of_kind(manifests, "ConfigMap")[f"chat-pdserve-{component}"]["data"].values()
    found: Manifest = yaml.safe_load(text)
    words = [word[2:].split("=", 1) for word in pods(manifests)[component]["containers"][0]["args"]]
    return found | {key.replace("-", "_"): value for key, value in words}


def mounted(manifests: list[Manifest], component: str) -> set[str]:
    return {mount["name"] for mount in pods(manifests)[component]["containers"][0]["volumeMounts"]}


def ports(manifests: list[Manifest], component: str) -> set[str]:
    return {port["name"] for port in pods(manifests)[component]["containers"][0]["ports"]}


@pytest.mark.parametrize(("values", "serving"), [({}, "router"), (FRONTENDS, "frontend")])
def test_one_kind_of_process_serves_clients(values: Manifest, serving: str) -> None:
    manifests = rendered(values)
    components = {"router", serving}
    assert components == pods(manifests).keys() & {"router", "frontend"}
    for component in components:
        serves = component == serving
        given = settings(manifests, component)
        assert given.get("serve_clients", True) is serves
        assert given.keys() & OF_CLIENTS == (OF_CLIENTS if serves else set())
        assert mounted(manifests, component) & {"tls", "keys"} == ({"tls", "keys"} if serves else set())
        assert ports(manifests, component) & {"public", "http"} == ({"public", "http"} if serves else set())
    service = of_kind(manifests, "Service")["chat-pdserve"]["spec"]
    assert service["selector"]["app.kubernetes.io/component"] == serving


def test_frontends_attach_to_every_router_also_to_one_that_is_not_ready() -> None:
    manifests = rendered(FRONTENDS)
    (address,) = settings(manifests, "frontend")["routers"]
    name, _, port = address.partition(":")
    service = of_kind(manifests, "Service")[name.partition(".")[0]]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"]["app.kubernetes.io/component"] == "router"
    assert (
        [each["port"] for each in service["ports"]] == [int(port)] == [settings(manifests, "router")["internal_port"]]
    )


def test_frontends_have_the_certificate_of_their_own_part() -> None:
    identity = {"from": "certManager", "issuerRef": {"name": "authority"}}
    manifests = rendered({**FRONTENDS, "tls.identity": identity})
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate").values()}
    volumes = {volume["name"]: volume for volume in pods(manifests)["frontend"]["volumes"]}
    shown = certificates[volumes["identity"]["secret"]["secretName"]]
    assert shown["uris"] == ["spiffe://cluster.local/pdserve/frontend"]
    assert shown["dnsNames"] == ["frontend.pdserve.internal"]
    assert "chat-pdserve-identity-frontend" not in of_kind(rendered({"tls.identity": identity}), "Certificate")


@pytest.mark.parametrize(
    ("source", "unread"),
    [(HUB, {"router"}), ({**PVC, "model.servedName": "m"}, {"router"}), (PVC, set())],
)
def test_routers_without_clients_read_no_model_unless_for_its_name(source: Manifest, unread: set[str]) -> None:
    """So that a lost router's successor does not download one."""
    manifests = rendered({**FRONTENDS, **source})
    found = {name for name in ("router", "frontend", "prefill") if "models" not in mounted(manifests, name)}
    assert found == unread
    downloading = {name for name, pod in pods(manifests).items() if "initContainers" in pod}
    assert downloading == ({"frontend", "prefill", "decode"} if source is HUB else set())
    assert "models" in mounted(rendered(source), "router")


def _router_settings() -> dict[str, Any]:
    """Return a value for each setting of a router that the chart lets an operator set."""
    values = RouterConfig.model_construct().model_dump(mode="json")
    some = {
        "max_num_requests": 9,
        "profile": "/p",
        "responses_file": "/p",
        "otlp_traces_endpoint": "http://collector:4317",
        "max_model_len": 99,
        "stream_interval": 3,
        "served_model_aliases": ["a"],
        "allowed_origins": ["https://chat.example"],
        "log_level": "error",
    }
    return {key: value for key, value in (values | some).items() if key not in values_schema.OF_THE_CHART}


def test_settings_that_frontends_share_with_routers_are_those_of_routers() -> None:
    given = _router_settings()
    assert given.keys() == RouterConfig.model_fields.keys() - values_schema.OF_THE_CHART
    assert None not in given.values()
    found = settings(rendered({**FRONTENDS, "router.config": given}), "frontend")
    shared = EndpointConfig.model_fields.keys() - values_schema.OF_THE_CHART
    assert {key: found.get(key) for key in shared} == {key: given[key] for key in shared}
    assert found.keys() <= FrontendConfig.model_fields.keys() | {"config"}


def test_settings_of_frontends_come_before_those_of_routers_and_these_before_those_of_all() -> None:
    values = {
        "pods.config": {"log_level": "error", "log_format": "json", "metrics": False},
        "router.config": {"log_level": "debug", "log_format": "text"},
        "frontends": {"replicas": 1, "config": {"log_level": "warning"}},
    }
    found = settings(rendered(values), "frontend")
    assert (found["log_level"], found["log_format"], found["metrics"]) == ("warning", "text", False)

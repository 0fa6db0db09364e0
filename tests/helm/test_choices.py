"""What a choice implies follows from it, or rendering fails: no default of one choice outlives another."""

from typing import Any

import pytest
import yaml
from helm_chart import Manifest, of_kind, pods, refusal, rendered

PUBLIC = {"tls.public": {"from": "secret", "existingSecret": "public"}}


def settings(manifests: list[Manifest], component: str) -> Manifest:
    """Return what a process is configured with."""
    (text,) = of_kind(manifests, "ConfigMap")[f"chat-pdserve-{component}"]["data"].values()
    found: Manifest = yaml.safe_load(text)
    return found


HUB = {"model.source": "hub", "model.hub.repository": "some/model"}
PVC = {"model.source": "pvc", "model.pvc.claimName": "models"}
IMAGE = {"model.source": "image", "model.image.reference": "r/m:1"}
SHARED = {"model.persistence.enabled": True}


@pytest.mark.parametrize(
    ("values", "path", "name"),
    [
        ({"model.source": "catalog"}, "smollm2-135m-instruct", None),
        (HUB, "/models/model", "some/model"),
        ({**HUB, "model.servedName": "m"}, "/models/model", "m"),
        ({**HUB, "model.path": "/models/model/m.gguf"}, "/models/model/m.gguf", "some/model"),
        ({**PVC, "model.path": "/models/m"}, "/models/m", None),
        ({**IMAGE, "model.path": "/models/m.gguf"}, "/models/m.gguf", None),
        ({**IMAGE, "model.path": "/models", "model.servedName": "m"}, "/models", "m"),
        ({"model.source": "builtIn", "model.path": "/opt/m"}, "/opt/m", None),
        (SHARED, "smollm2-135m-instruct", None),
        ({**HUB, **SHARED, "model.hub.revision": "v1"}, "some/model@v1", "some/model"),
    ],
)
def test_every_process_serves_the_model_of_the_source(values: Manifest, path: str, name: str | None) -> None:
    manifests = rendered({**PUBLIC, **values, "frontends.replicas": 1})
    for component in ("router", "frontend", "prefill", "decode"):
        given = settings(manifests, component)
        assert (given["model"], given.get("served_model_name")) == (path, name), component


BELOW = "model.path: must be below /models where model.source is pvc or image"
REFUSED: list[tuple[Manifest, str]] = [
    (PVC, BELOW),
    (IMAGE, BELOW),
    ({**PVC, "model.path": "m"}, BELOW),
    ({**PVC, "model.path": "/modelsX"}, BELOW),
    ({**PVC, "model.path": "/models"}, "model.servedName: is required where model.path is /models"),
    ({**HUB, "model.path": "/models/other"}, "model.path: must be empty or below /models/model"),
    ({"model.source": "builtIn"}, "model.path: must be a path in the images"),
    ({"model.path": "/opt/m"}, "model.path: must be a name, not a path, where model.source is catalog"),
    ({"model.hub.repository": "some/model"}, "model.hub.repository: has no effect unless model.source is hub"),
    ({"model.pvc.claimName": "c"}, "model.pvc.claimName: has no effect unless model.source is pvc"),
    ({"model.image.reference": "r/m:1"}, "model.image.reference: has no effect unless model.source is image"),
    ({**PVC, **SHARED, "model.path": "/models/m"}, "model.source: must be catalog or hub where model.persist"),
    ({**HUB, **SHARED, "model.path": "/models/model/m.gguf"}, "model.path: must be empty where model.source is hub"),
    ({"model.persistence.existingClaim": "c"}, "model.persistence.existingClaim: has no effect unless"),
    (
        {"tls.public": {"existingSecret": "s"}},
        "tls.public.existingSecret: has no effect unless tls.public.from is secret",
    ),
    (
        {"tls.public": {"issuerRef": {"name": "i"}}},
        "tls.public.issuerRef: has no effect unless tls.public.from is certManager",
    ),
    ({"tls.public": {"from": "certManager"}}, "tls.public.issuerRef.name: is required where"),
    ({"tls.identity.from": "certManager"}, "tls.identity.issuerRef.name: is required where"),
    (
        {
            "frontends.replicas": 1,
            "tls.identity.from": "secret",
            "tls.identity.existingSecrets": {"router": "r", "worker": "w", "operator": "o"},
        },
        "tls.identity.existingSecrets.frontend: is required where tls.identity.from is secret and there are frontends",
    ),
    ({"frontends.replicas": 1, "router.replicas": 0}, "router.replicas: must be over 0 where there are frontends"),
    ({"frontends.image.repository": ""}, "frontends.image.repository: is required"),
    (
        {"frontends.podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": 1}},
        "frontends.podDisruptionBudget.minAvailable: cannot be set together with maxUnavailable",
    ),
    ({"router.route.enabled": True}, "router.route.parentRefs: are required where router.route.enabled is true"),
    ({"autoscaling.by": "pdserve", "autoscaling.follow": "waiting"}, "autoscaling.follow: must be desired where"),
    (
        {"decode.podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": 1}},
        "decode.podDisruptionBudget.minAvailable: cannot be set together with maxUnavailable",
    ),
    ({"router.serviceAccount.create": False}, "router.serviceAccount.name: is required where"),
    (
        {
            "autoscaling.by": "pdserve",
            "workers.devices.count": 1,
            "autoscaling.policy.pools.decode.devicesPerReplica": 2,
        },
        "autoscaling.policy.pools.decode.devicesPerReplica: is 2, and decode.devices.count is 1",
    ),
]


@pytest.mark.parametrize(("values", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_does_not_go_together_is_refused_by_name(values: Manifest, named: str) -> None:
    public = {} if "tls.public" in values else PUBLIC
    assert named in refusal({**public, **values})


def test_all_that_does_not_go_together_is_named_at_once() -> None:
    found = refusal({**PUBLIC, **PVC, "tls.identity.from": "secret", "router.ingress.enabled": True})
    for named in (BELOW, "tls.identity.existingSecrets.worker:", "router.ingress.host:"):
        assert named in found


@pytest.mark.parametrize(
    ("workers", "repository", "device"),
    [
        ({}, "pdserve-worker-cpu", None),
        ({"devices": {"count": 1}}, "pdserve-worker-cuda", "cuda"),
        ({"image": {"repository": "mine"}, "devices": {"count": 1}}, "mine", "cuda"),
    ],
)
def test_the_image_and_the_device_follow_from_the_number_of_devices(
    workers: Manifest, repository: str, device: str | None
) -> None:
    manifests = rendered({"workers": workers})
    for pool in ("prefill", "decode"):
        image = pods(manifests)[pool]["containers"][0]["image"]
        assert (image.partition(":")[0], settings(manifests, pool).get("device")) == (repository, device)


def test_a_pool_with_devices_beside_one_without_has_an_image_of_its_own() -> None:
    found = pods(rendered({"prefill.devices.count": 1}))
    assert "cuda" in found["prefill"]["containers"][0]["image"]
    assert "cpu" in found["decode"]["containers"][0]["image"]


def test_the_policy_counts_the_devices_and_waits_for_the_drains_that_pods_have() -> None:
    given = {"autoscaling.by": "keda", "workers.devices.count": 2, "decode.drainTimeoutSeconds": 300}
    text = of_kind(rendered(given), "ConfigMap")["chat-pdserve-policy"]["data"]["policy.yaml"]
    pools = yaml.safe_load(text)["pools"]
    assert {name: (pool["devicesPerReplica"], pool["drainTimeout"]) for name, pool in pools.items()} == {
        "prefill": (2, 120),
        "decode": (2, 300),
    }


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        ({}, {"maxUnavailable": 1}),
        ({"minAvailable": "50%"}, {"minAvailable": "50%"}),
        ({"minAvailable": 0}, {"minAvailable": 0}),
        ({"maxUnavailable": 0}, {"maxUnavailable": 0}),
    ],
)
def test_a_disruption_budget_has_one_limit(budget: Manifest, limit: dict[str, Any]) -> None:
    found = of_kind(rendered({"decode.podDisruptionBudget": budget}), "PodDisruptionBudget")
    spec = found["chat-pdserve-decode"]["spec"]
    assert {key: value for key, value in spec.items() if key != "selector"} == limit


NIGHT = {"start": "20:00", "end": "06:00", "minReplicas": 0}


@pytest.mark.parametrize(
    "pool",
    [pytest.param({"minReplicas": 0}, marks=pytest.mark.long), {"schedules": [NIGHT]}],
    ids=["always", "at night"],
)
def test_a_pool_that_may_be_empty_lets_requests_wait_at_routers(pool: Manifest) -> None:
    values = {"autoscaling.by": "pdserve", "autoscaling.policy.pools.decode": {"maxReplicas": 4, **pool}}
    assert settings(rendered(values), "router")["scale_to_zero"] is True
    assert "scale_to_zero" not in settings(rendered({**values, "autoscaling.by": "none"}), "router")
    scaled = of_kind(rendered({**values, "autoscaling.by": "keda"}), "ScaledObject")
    assert [each["spec"]["minReplicaCount"] for each in scaled.values()] == [1, pool.get("minReplicas", 1)]
    needs = "autoscaling.policy.pools: minReplicas 0 needs autoscaling.by pdserve, or keda with follow desired"
    assert needs in refusal({**values, "autoscaling.by": "hpa"})
    assert needs in refusal({**values, "autoscaling.by": "keda", "autoscaling.follow": "waiting"})


@pytest.mark.parametrize("source", [{}, HUB])
def test_all_pods_that_serve_share_a_claim_which_the_first_one_fills(source: Manifest) -> None:
    manifests = rendered({**SHARED, **source})
    (claim,) = of_kind(manifests, "PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}}
    for component in ("router", "prefill", "decode"):
        pod, model = pods(manifests)[component], settings(manifests, component)["model"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "models"]
        assert volume == {"name": "models", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        (download,), (main,) = pod["initContainers"], pod["containers"]
        assert download["command"] == ["pdserve", "models", "fetch", model]
        assert {"name": "models", "mountPath": "/models"} in download["volumeMounts"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in main["volumeMounts"]
        for container in (download, main):
            assert {"name": "PDSERVE_DOWNLOAD_DIR", "value": "/models"} in container["env"]
    assert "initContainers" not in pods(manifests)["autoscaler"]


def test_a_claim_that_exists_is_used_and_none_is_made() -> None:
    manifests = rendered({**SHARED, "model.persistence.existingClaim": "models"})
    assert of_kind(manifests, "PersistentVolumeClaim") == {}
    (volume,) = [each for each in pods(manifests)["decode"]["volumes"] if each["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}


def test_a_claim_is_made_as_it_is_asked_for() -> None:
    given = {"accessModes": ["ReadWriteOnce"], "storageClass": "fast", "size": "20Gi"}
    (claim,) = of_kind(
        rendered({f"model.persistence.{key}": value for key, value in given.items()} | SHARED), "PersistentVolumeClaim"
    ).values()
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "20Gi"}},
    }


def test_without_a_claim_each_pod_has_its_own_model() -> None:
    """A token of the hub goes to the container that downloads alone."""
    found = rendered({**HUB, "model.hub.tokenSecret": {"name": "hub", "key": "token"}})
    assert of_kind(found, "PersistentVolumeClaim") == {}
    for component in ("router", "prefill", "decode"):
        pod = pods(found)[component]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "models"]
        assert set(volume) == {"name", "emptyDir"}
        assert [each["command"][:2] for each in pod["initContainers"]] == [["hf", "download"]]

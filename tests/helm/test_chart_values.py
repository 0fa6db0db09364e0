"""The chart's values are checked by name before anything is rendered, against the settings that processes have."""

import json
from base64 import b64decode
from pathlib import Path

import policy_rules
import pytest
import values_schema
import yaml
from helm_chart import CHART, of_kind, refusal, rendered


def test_the_schema_is_that_of_the_settings() -> None:
    """Run `python deploy/helm/schema/values_schema.py` where a setting has changed."""
    assert values_schema.FILE.read_text(encoding="utf-8") == values_schema.values_schema()


def test_durations_of_policies_have_the_limits_of_their_fields() -> None:
    """Run `python deploy/helm/schema/policy_rules.py` where a field of policies has changed."""
    kept = json.loads(policy_rules.FILE.read_text(encoding="utf-8"))
    assert kept["durations"] == json.loads(policy_rules.policy_rules())["durations"]


BAD = [
    ({"prefill.replica": 2}, "prefill: Additional property replica is not allowed"),
    ({"decode.replicas": -1}, "decode.replicas: Must be greater than or equal to 0"),
    ({"workers.config.max_num_seq": 3}, "workers.config: Additional property max_num_seq is not allowed"),
    ({"prefill.config.max_num_seqs": 0}, "prefill.config.max_num_seqs: Must be greater than or equal to 1"),
    ({"router.config.placement": "best"}, 'router.config.placement must be one of the following: "goodput"'),
    ({"router.config.port": 3}, "router.config: Additional property port is not allowed"),
    ({"workers.config.role": "mixed"}, "workers.config: Additional property role is not allowed"),
    ({"autoscaling.by": "me"}, "autoscaling.by must be one of the following"),
    ({"autoscaling.policy.objectives.ttft": 3}, "objectives: Additional property ttft is not allowed"),
    ({"autoscaling.policy.pools.decode.maxReplicas": 0}, "pools.decode.maxReplicas: Must be greater than"),
    ({"model.source": "s3"}, "model.source must be one of the following"),
    ({"tls.public.from": "none"}, "tls.public.from must be one of the following"),
    ({"workers.config.device": "cuda"}, "workers.config: Additional property device is not allowed"),
    ({"global.imageRegistry": "registry.example.com/team/"}, "global.imageRegistry: Does not match pattern"),
    ({"pods.extraEnv": [{"name": "A", "value": 3}]}, "pods.extraEnv.0.value: Invalid type. Expected: string"),
    ({"pods.extraEnvFrom": [{"secretRef": {}}]}, "pods.extraEnvFrom.0.secretRef: name is required"),
    ({"model.hub.tokenSecret": {"name": "hub"}}, "model.hub.tokenSecret: Has a dependency on key"),
    ({"fullnameOverride": "Not_A_Name"}, "fullnameOverride: Does not match pattern"),
    ({"secret.existingSecret": "a b"}, "secret.existingSecret: Does not match pattern"),
    ({"router.route.parentRefs": [{"namespace": "n"}]}, "router.route.parentRefs.0: name is required"),
    ({"router.tolerations": [{"operator": "Exist"}]}, "router.tolerations.0.operator must be one of"),
    ({"operator.lifecycle.preStop": {}}, "operator.lifecycle.preStop: Must have at least 1 properties"),
    ({"operator.resources.limits.memory": "lots"}, "operator.resources.limits.memory: Must validate at least one"),
    ({"decode.rdma.devices": ["mlx5"]}, "decode.rdma.devices.0: Does not match pattern"),
    ({"workers.sharedMemory": "lots"}, "workers.sharedMemory: Does not match pattern"),
    ({"pods.podSecurityContext.runAsUser": 0}, "pods.podSecurityContext.runAsUser: Must be greater than or equal to 1"),
    ({"frontends.config.placement": "goodput"}, "frontends.config: Additional property placement is not allowed"),
    ({"frontends.config.shares_ports": True}, "frontends.config: Additional property shares_ports is not allowed"),
    ({"frontends.config.router_grace_s": -1}, "frontends.config.router_grace_s: Must be greater than or equal to 0"),
    ({"frontends.service": {}}, "frontends: Additional property service is not allowed"),
    ({"router.route.hostnames": 17 * ["a.example"]}, "router.route.hostnames: Array must have at most 16 items"),
    ({"router.image.digest": "latest"}, "router.image.digest: Does not match pattern"),
]


def test_bad_values_are_refused_by_name() -> None:
    """All at once, so that the operator mends them at once."""
    found = refusal({key: value for values, _ in BAD for key, value in values.items()})
    assert [named for _, named in BAD if named not in found] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model.source": "pvc"}, "model.pvc.claimName: is required where model.source is pvc"),
        ({"model.source": "hub"}, "model.hub.repository: is required where model.source is hub"),
        ({"tls.public": {"from": "secret", "existingSecret": ""}}, "tls.public.existingSecret: is required"),
        ({"tls.identity.from": "secret"}, "tls.identity.existingSecrets."),
        ({"router.ingress.enabled": True}, "router.ingress.host: is required"),
        ({"autoscaling.by": "hpa", "operator.replicas": 2}, "operator.replicas: is 1 where"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, object], named: str) -> None:
    assert named in refusal({"tls.public": {"from": "secret", "existingSecret": "public"}, **values})


def test_every_key_has_a_default() -> None:
    """No key of the chart is known to the schema alone, so that an operator finds all in values.yaml."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    known = json.loads(values_schema.values_schema())["properties"]
    assert defaults.keys() == known.keys()
    for part in ("pods", "tls", "networkPolicy"):
        assert defaults[part].keys() == known[part]["properties"].keys()
    for part in ("router", "frontends", "workers", "operator"):
        assert known[part]["properties"].keys() == defaults["pods"].keys() | defaults[part].keys()


def test_what_the_operator_reads_next_warns_of_gpus_without_rdma() -> None:
    def notes(**values: object) -> str:
        text = '{{ include "pdserve/templates/NOTES.txt" . | b64enc }}'
        shown = {"kind": "Notes", "metadata": {"name": "-"}, "text": text}
        (found,) = of_kind(rendered({"extraObjects": [shown], **values}), "Notes").values()
        return b64decode(found["text"]).decode()

    plain, with_gpus = notes(), notes(**{"decode.devices.count": 1})
    assert "helm test -n llm chat" in plain
    assert "deployment/chat-pdserve-frontend" not in plain
    started = "deployment/chat-pdserve-router deployment/chat-pdserve-frontend deployment/chat-pdserve-prefill"
    assert started in notes(**{"frontends.replicas": 1})
    assert "RDMA" not in plain
    assert "WARNING: decode workers have GPUs and no RDMA resource (decode.rdma.enabled)" in with_gpus
    assert "WARNING: prefill" not in with_gpus


def test_further_manifests_are_rendered_as_templates() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {}}
    assert "chat-x" in {each["metadata"]["name"] for each in rendered({"extraObjects": [extra]})}


def test_files_of_values_name_images_that_the_repository_builds() -> None:
    named = {"pdserve-worker-cpu", "pdserve-worker-cuda"} | {
        Path(part["image"]["repository"]).name
        for file in [CHART / "values.yaml", *sorted((CHART / "values").glob("*.yaml"))]
        for part in yaml.safe_load(file.read_text(encoding="utf-8")).values()
        if isinstance(part, dict) and isinstance(part.get("image"), dict) and part["image"].get("repository")
    }
    assert named == {"pdserve-router", "pdserve-worker-cpu", "pdserve-worker-cuda"}

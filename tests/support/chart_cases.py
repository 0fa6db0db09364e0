"""Values that the chart's tests render it with, by what they are for: (values by dotted keys, files of the chart)."""

from typing import Any

_ISSUER = {"name": "authority", "kind": "ClusterIssuer"}
_DIGEST = "sha256:" + 64 * "0"

EVERYTHING: dict[str, Any] = {
    "global.imageRegistry": "registry.example.com/team",
    "imagePullSecrets": [{"name": "pull"}],
    "model": {"servedName": "m", "source": "hub", "hub": {"repository": "some/model"}},
    "secret.existingSecret": "shared",
    "keys.existingSecret": "keys",
    "tls.public": {"from": "certManager", "issuerRef": _ISSUER, "dnsNames": ["llm.example.com"]},
    "tls.identity": {"from": "certManager", "issuerRef": _ISSUER},
    "pods": {
        "image": {"digest": _DIGEST},
        "config": {"log_level": "debug"},
        "extraArgs": ["--log-level=info"],
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "strategy": {"type": "Recreate"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "podDisruptionBudget": {"maxUnavailable": "25%"},
        "extraEnvFrom": [{"secretRef": {"name": "variables"}}],
        "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
        "serviceAccount": {"annotations": {"g": "h"}},
    },
    "router": {
        "replicas": 3,
        "service": {"type": "LoadBalancer", "annotations": {"e": "f"}, "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecret": "ingress"},
        "route": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.com"]},
    },
    "frontends": {"replicas": 2, "config": {"max_num_waiting": 64}},
    "workers": {"devices": {"count": 2}, "rdma": {"enabled": True, "networks": "roce", "devices": ["mlx5_0:1"]}},
    "decode": {"config": {"max_num_seqs": 128}, "rdma": {"ipcLock": False}},
    "autoscaling": {"by": "keda", "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}},
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "kubernetesApi": {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [443]},
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}],
        "extraIngress": [{"from": [{"podSelector": {}}]}],
    },
    "monitoring": {
        "metrics": "ServiceMonitor",
        "labels": {"release": "prometheus"},
        "rules": {"enabled": True},
        "dashboards": {"enabled": True, "annotations": {"folder": "LLM"}},
    },
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}, "data": {}}
    ],
}

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "laptop": ({}, ("laptop",)),
    "h100-rdma": ({}, ("h100-rdma",)),
    "several-nodes": ({}, ("several-nodes",)),
    "existing-secrets": (
        {
            "tls.public": {"from": "secret", "existingSecret": "public"},
            "tls.identity.from": "secret",
            "tls.identity.existingSecrets": {"router": "r", "worker": "w", "operator": "o"},
        },
        (),
    ),
    "frontends": (
        {
            "frontends": {"replicas": 2},
            "tls.public": {"from": "secret", "existingSecret": "public"},
            "tls.identity.from": "secret",
            "tls.identity.existingSecrets": {"router": "r", "worker": "w", "operator": "o", "frontend": "f"},
        },
        (),
    ),
    "hpa-desired": ({"autoscaling.by": "hpa"}, ()),
    "hpa-waiting": ({"autoscaling.by": "hpa", "autoscaling.follow": "waiting"}, ()),
    "keda-waiting": ({"autoscaling.by": "keda", "autoscaling.follow": "waiting"}, ()),
    "policy-resource": ({"autoscaling.by": "pdserve", "autoscaling.policyAs": "AutoscalingPolicy"}, ()),
    "http-route": ({"router.route": {"enabled": True, "kind": "HTTPRoute", "parentRefs": [{"name": "g"}]}}, ()),
    "image-volume": ({"model": {"path": "/models/m", "source": "image", "image": {"reference": "r/m:1"}}}, ()),
    "shared-models": (
        {
            "model": {
                "source": "hub",
                "hub": {"repository": "some/model", "tokenSecret": {"name": "hub", "key": "token"}},
                "persistence": {"enabled": True, "storageClass": "nfs"},
            }
        },
        (),
    ),
    "two-nodes": (
        {
            "tls.identity": {"from": "certManager", "issuerRef": _ISSUER},
            "decode": {"nodes": 2, "replicas": 3, "config": {"log_level": "debug"}},
        },
        (),
    ),
    "two-nodes-hpa": (
        {
            "tls.identity": {"from": "certManager", "issuerRef": _ISSUER},
            "workers": {"nodes": 2, "config": {"tensor_parallel_size": 4}, "extraArgs": ["--seed=1"]},
            "autoscaling": {"by": "hpa", "follow": "waiting"},
        },
        (),
    ),
    "everything": (EVERYTHING, ()),
}

"""Renders the Helm chart as `helm` does, and reads what it says."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "pdserve"
RELEASE, NAMESPACE = "chat", "llm"

Manifest = dict[str, Any]


class Loader(yaml.CSafeLoader):
    """Reads manifests as Kubernetes does, for which = is a text."""


Loader.add_constructor("tag:yaml.org,2002:value", yaml.CSafeLoader.construct_yaml_str)


def helm(*arguments: str, check: bool = True, values: Manifest | None = None) -> "subprocess.CompletedProcess[str]":
    """Run helm, whose errors are shown where it is to succeed. It reads `values` where --values=- is an argument."""
    command = [str(Path(sys.executable).with_name("helm")), *arguments]
    given = json.dumps(values, ensure_ascii=False).replace("\ufeff", "\\ufeff")
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


def template(values: Manifest, *files: str) -> list[str]:
    """Return the command that renders the chart with values, over those of files in its folder `values`."""
    shown = [f"--values={CHART / 'values' / file}.yaml" for file in files]
    given = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    return ["template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *shown, *given]


def rendered(values: Manifest, *files: str) -> list[Manifest]:
    """Return the manifests of the chart with values, by their dotted keys, over those of files in its folder.

    Where any value is given the public certificate exists, unless it is given too: to make one takes most of the time.
    """
    if values and not any(key.startswith("tls.public") for key in values):
        values = {**values, "tls.public": {"from": "secret", "existingSecret": "public"}}
    return [document for document in _load(tuple(template(values, *files))) if document]


@cache
def _load(arguments: tuple[str, ...]) -> list[Manifest]:
    return list(yaml.load_all(helm(*arguments).stdout, Loader))


def refusal(values: Manifest) -> str:
    """Return why the chart refuses values."""
    done = helm(*template(values), check=False)
    assert done.returncode != 0, "the values are taken"
    return done.stderr


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of a kind by their names."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def named_templates(manifests: Sequence[Manifest]) -> list[tuple[str, Manifest]]:
    """Return the templates of all pods that workloads make, each with its component.

    Further pods of a worker are called COMPONENT-node.
    """
    found = [each["spec"]["template"] for each in manifests if each["kind"] == "Deployment"]
    groups = [each["spec"]["leaderWorkerTemplate"] for each in manifests if each["kind"] == "LeaderWorkerSet"]
    first = [(component_of(each), each) for each in [*found, *[each["leaderTemplate"] for each in groups]]]
    return first + [(f"{component_of(each['workerTemplate'])}-node", each["workerTemplate"]) for each in groups]


def templates_of(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return these templates of a release with one model by their names."""
    return dict(named_templates(manifests))


def component_of(pod: Manifest) -> str:
    named: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return named


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the specifications of all pods, as `named_templates` names them."""
    alone = {component_of(each): each for each in manifests if each["kind"] == "Pod"}
    return {name: each["spec"] for name, each in (templates_of(manifests) | alone).items()}


def settings_of(manifests: Sequence[Manifest], name: str) -> str:
    """Return the YAML file of settings of such a pod's process."""
    component = name.removesuffix("-node")
    file = "node.yaml" if name != component else f"{component}.yaml"
    text: str = of_kind(manifests, "ConfigMap")[f"chat-pdserve-{component}"]["data"][file]
    return text

"""What `deploy/ray` holds fits Ray's own schema, and itself."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import yaml

from pdserve.autoscaler.schema import load

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def test_the_virtual_machines_fit_rays_schema() -> None:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    machines = yaml.safe_load((FOLDER / "vms.yaml").read_text())
    jsonschema.validate(machines, schema)
    assert machines["head_node_type"] in machines["available_node_types"]
    starts = machines["head_start_ray_commands"] + machines["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in command for command in starts if "ray start" in command)


def test_the_pods_have_the_tested_ray_its_token_and_the_secret() -> None:
    cluster = yaml.safe_load((FOLDER / "raycluster.yaml").read_text())["spec"]
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
        assert volumes["secret"]["secret"]["defaultMode"] & 0o026 == 0
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1


def test_the_policy_that_the_page_names_is_for_ray() -> None:
    named = "deploy/policies/ray.yaml"
    assert named in (FOLDER / "README.md").read_text()
    assert load(FOLDER.parents[1] / named).actuator.kind == "ray"

"""Random values of the chart: those that its schema accepts, made to keep the rules that stand beside the schema."""

import copy
import json
import re
from functools import cache
from typing import Any

import yaml
from helm_chart import CHART, Manifest
from hypothesis import strategies as st
from pydantic import ValidationError
from schema_values import Values

from pdserve.autoscaler.schema import Policy

SCHEMA: Manifest = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS: Manifest = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
RULES: list[Manifest] = yaml.safe_load((CHART / "files" / "requirements.yaml").read_text(encoding="utf-8"))
PARTS = ("router", "frontends", "prefill", "decode", "operator")
POOLS = ("prefill", "decode")
_SIMPLE = "abcdefghijklmnopqrstuvwxyz0123456789-./"  # of which paths are made that a rule asks for
_OWN_VOLUMES = ("scratch", "config")
_STRATEGIES = Values(SCHEMA)


@st.composite
def chart_values(draw: st.DrawFn) -> Manifest:
    """Return values that rendering takes."""
    values: Manifest = draw(_STRATEGIES.of(SCHEMA))
    values.pop("models", None)  # each would be values of its own; test_several_models.py has these
    if draw(st.booleans()):  # by itself this number is hardly ever drawn
        _set(values, "frontends.replicas", draw(st.integers(1, 3)))
    _keep_policy(values)
    for part in ("pods", "workers", *PARTS):
        _keep_volumes(values.get(part, {}))
    while (broken := _broken(merged(values))) is not None:
        _set(values, broken[0], draw(_asked(*broken)))
    _keep_accounts(values)
    return values


def merged(values: Manifest) -> Manifest:
    """Return values with defaults, each component's over what it has in common with others, as the chart has them."""
    whole = _over(DEFAULTS, values)
    for part in PARTS:
        common = _over(whole["pods"], whole["workers"]) if part in POOLS else whole["pods"]
        whole[part] = _over(common, whole[part])
    return whole


def has_frontends(values: Manifest) -> bool:
    """Return whether processes of their own serve the clients."""
    return bool(merged(values)["frontends"]["replicas"])


def _over(below: Any, above: Any) -> Any:  # noqa: ANN401 - values
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: _over(below.get(key), above.get(key, below.get(key))) for key in {**below, **above}}
    return copy.deepcopy(above)


def _at(values: Manifest, key: str) -> str:
    """Return the value at dotted keys as rules see it."""
    found: Any = values
    for step in key.split("."):
        found = found.get(step, "") if isinstance(found, dict) else ""
    return found if isinstance(found, str) else json.dumps(found, separators=(",", ":"))


def _broken(whole: Manifest) -> tuple[str, str] | None:
    """Return the key whose value breaks a rule, and the pattern that it must match; None if all rules are kept."""
    for rule in RULES:
        for part in PARTS if "*" in rule["key"] else ("",):
            key, where = rule["key"].replace("*", part), rule["where"].items()
            applies = all(re.fullmatch(pattern, _at(whole, name.replace("*", part))) for name, pattern in where)
            if applies and not re.fullmatch(rule["is"], _at(whole, key)):
                return key, rule["is"]
    return None


@cache
def _asked(key: str, pattern: str) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a key that a rule's pattern matches too."""
    schema = SCHEMA
    for step in key.split("."):
        schema = _STRATEGIES.resolved(_STRATEGIES.resolved(schema)["properties"][step])
    if pattern == r"\{\}":
        return st.just({})
    if pattern == "":
        return st.none() if schema.get("type") == "object" else st.just("")
    if pattern.endswith("(/.*)?"):
        allowed = re.compile(schema["pattern"], re.ASCII)
        return st.from_regex(pattern, fullmatch=True, alphabet=_SIMPLE).filter(
            lambda given: bool(allowed.search(given))
        )
    return _STRATEGIES.of(schema).filter(lambda value: bool(re.fullmatch(pattern, _at({"it": value}, "it"))))


def _set(values: Manifest, key: str, value: Any) -> None:  # noqa: ANN401 - of a key
    part, *above, last = key.split(".")
    if value is None:
        for other in ("pods", "workers", part):
            _drop(values.get(other, {}), [*above, last])
        return
    for step in (part, *above):
        values = values.setdefault(step, {})
    values[last] = value


def _drop(values: Manifest, keys: list[str]) -> None:
    for step in keys[:-1]:
        values = values.get(step, {})
    values.pop(keys[-1], None)


def _keep_policy(values: Manifest) -> None:
    """Leave a policy out that would be refused, as most that are made at random are; other tests are about those."""
    head = {"apiVersion": "pdserve/v1alpha1", "kind": "AutoscalingPolicy"}
    policy = merged(values)["autoscaling"]["policy"]
    counts = {merged(values)[pool]["devices"]["count"] for pool in POOLS}
    try:
        Policy.model_validate({**head, **policy})
    except ValidationError:
        values.get("autoscaling", {}).pop("policy", None)
    if _may_be_empty(policy) and _keeps_a_replica(merged(values)["autoscaling"]):
        values["autoscaling"].pop("policy", None)
    if counts != {0}:
        nodes = min(2, *[merged(values)[pool]["nodes"] for pool in POOLS])  # as many for both, within the usual budget
        for part in ("workers", *POOLS):
            values.get(part, {}).pop("devices", None)
            values.setdefault(part, {}).setdefault("devices", {})["count"] = 1
            values[part]["nodes"] = nodes
        values.get("autoscaling", {}).pop("policy", None)


def _may_be_empty(policy: Manifest) -> bool:
    limits = [each for pool in policy["pools"].values() for each in (pool, *pool.get("schedules", []))]
    return any(each.get("minReplicas") == 0 for each in limits)


def _keeps_a_replica(scaling: Manifest) -> bool:
    """Return whether what scales the pools cannot go below one replica."""
    return scaling["by"] == "hpa" or (scaling["by"] == "keda" and scaling["follow"] == "waiting")


def _keep_accounts(values: Manifest) -> None:
    names = {part: merged(values)[part]["serviceAccount"]["name"] for part in PARTS}
    if names.pop("operator") in {name for name in names.values() if name}:
        _set(values, "operator.serviceAccount.name", "the-operators-own")


def _keep_volumes(part: Manifest) -> None:
    """Give containers and volumes names of their own, and mounts the names of volumes that there are."""
    for index, volume in enumerate(part.get("extraVolumes", [])):
        volume["name"] = f"{volume['name'][:50]}-{index}"
    for kind in ("initContainers", "extraContainers"):
        for index, container in enumerate(part.get(kind, [])):
            container["name"] = f"{container['name'][:40]}-{kind[:4].lower()}-{index}"
            _keep_mounts(container.get("volumeMounts", []), _OWN_VOLUMES)
    _keep_mounts(part.get("extraVolumeMounts", []), _OWN_VOLUMES)


def _keep_mounts(mounts: list[Manifest], volumes: tuple[str, ...]) -> None:
    for index, mount in enumerate(mounts):
        mount["name"] = volumes[index % len(volumes)]
        mount["mountPath"] = f"{mount['mountPath'].rstrip('/')}/{index}"

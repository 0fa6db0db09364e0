"""Whatever values the chart's schema and its rules accept, Kubernetes accepts what is rendered."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import values_schema
import yaml
from api_server import refusals
from chart_references import dangling, texts
from helm_chart import CHART, Loader, Manifest, helm
from hypothesis import HealthCheck, Phase, given, settings
from kubernetes_schemas import problems
from kubernetes_validate.utils import all_versions
from random_values import chart_values, has_frontends

VERSIONS = [*dict.fromkeys(version.rpartition(".")[0] for version in all_versions())]
SUPPORTED = VERSIONS[VERSIONS.index(values_schema.oldest_kubernetes()) :]
MADE = re.compile(r"(?<=:= )gen(CA|SignedCert) .*(?= }})")  # RSA keys take a second each
BATCH = 10  # renderings by one process
RELAXED: Any = {"deadline": None, "phases": [Phase.generate], "suppress_health_check": [*HealthCheck]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a chart that holds this one many times, by the names r0, r1, ..., so that one process renders them all."""
    folder = tmp_path_factory.mktemp("charts") / "whole"
    shutil.copytree(CHART, folder / "charts" / "pdserve")
    secrets = folder / "charts" / "pdserve" / "templates" / "secrets.yaml"
    text, number = MADE.subn(r'dict "Cert" "c" "Key" "k"', secrets.read_text(encoding="utf-8"))
    assert number == 2
    secrets.write_text(text, encoding="utf-8")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    held = [{"name": "pdserve", "version": version, "alias": f"r{index}"} for index in range(BATCH)]
    chart = {"apiVersion": "v2", "name": "whole", "version": "0.1.0", "dependencies": held}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    return folder


def render(whole: Path, batch: list[Manifest]) -> dict[str, list[Manifest]]:
    """Return the manifests of each member of a batch."""
    values = {f"r{index}": each for index, each in enumerate(batch)}
    shown = helm("template", "chat", str(whole), "--namespace=llm", "--values=-", values=values).stdout
    found: dict[str, list[Manifest]] = {name: [] for name in values}
    for text in shown.split("\n---\n# Source: whole/charts/")[1:]:
        found[text.partition("/")[0]] += [each for each in yaml.load_all(text.partition("\n")[2], Loader) if each]
    return found


def look_at(whole: Path, batch: list[Manifest], versions: list[str]) -> None:
    for name, manifests in render(whole, batch).items():
        values = batch[int(name[1:])]
        assert sum(each["kind"] in ("Deployment", "LeaderWorkerSet") for each in manifests) == 4 + has_frontends(values)
        assert [*dangling(manifests, {*texts(values)})] == []
        identities = [(each["kind"], each["metadata"]["name"]) for each in manifests]
        assert len({*identities}) == len(identities), identities
        for manifest in manifests:
            assert [*refusals(manifest)] == [], values
            for version in versions:
                assert problems(manifest, version) == [], (version, values)


def drawn(count: int, **options: Any) -> list[list[Manifest]]:  # noqa: ANN401 - hypothesis's
    """Return random values in batches: each is drawn by itself, as a batch is more than hypothesis makes at once."""
    found = list[Manifest]()

    @settings(max_examples=count, **options, **RELAXED)
    @given(chart_values())
    def collect(values: Manifest) -> None:
        found.append(values)

    collect()
    assert len(found) == count
    return [found[start : start + BATCH] for start in range(0, count, BATCH)]


def test_what_random_values_render_is_valid(whole: Path) -> None:
    for batch in drawn(BATCH, derandomize=True):
        look_at(whole, batch, [SUPPORTED[0], SUPPORTED[-1]])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_many_random_values_render_is_valid(whole: Path) -> None:
    for batch in drawn(500):
        look_at(whole, batch, SUPPORTED)

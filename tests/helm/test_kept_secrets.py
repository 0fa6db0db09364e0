"""What the chart has made once is kept by upgrades, with what an operator changed in it."""

import re
import shutil
from base64 import b64encode
from pathlib import Path

import pytest
import yaml
from helm_chart import CHART, Manifest, helm, of_kind

LOOKUP = re.compile(r'lookup "v1" "Secret" \S+ \(include "([\w.]+)" [.$]\)')
NAMES = '["chat-pdserve","chat-pdserve.llm","chat-pdserve.llm.svc","chat-pdserve.llm.svc.cluster.local"]'


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """Return the chart, with values in `global.kept` in place of the cluster's secrets."""
    copy = tmp_path / "pdserve"
    shutil.copytree(CHART, copy)
    secrets = copy / "templates" / "secrets.yaml"
    text, number = LOOKUP.subn(r'index $.Values.global.kept "\1"', secrets.read_text(encoding="utf-8"))
    assert number == 3
    secrets.write_text(text, encoding="utf-8")
    return copy


def upgrade(chart: Path, names: str, *dns_names: str, check: bool = True) -> tuple[list[Manifest], str]:
    kept = {
        "pdserve.secretName": {"data": {"secret": _encoded("shared")}},
        "pdserve.keysName": {"data": {"key": _encoded("one"), "keys.yaml": _encoded("tenants: {mine: {}}")}},
        "pdserve.tlsName": {
            "metadata": {"annotations": {"pdserve.dev/dns-names": names}},
            "data": {"tls.crt": _encoded("certificate"), "tls.key": "", "ca.crt": ""},
        },
    }
    values = chart.parent / "given.yaml"
    values.write_text(yaml.safe_dump({"global": {"kept": kept}, "tls": {"public": {"dnsNames": [*dns_names]}}}))
    done = helm("template", "chat", str(chart), "--namespace=llm", f"--values={values}", check=check)
    return [each for each in yaml.safe_load_all(done.stdout) if each], done.stderr


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def test_secrets_are_kept_with_the_keys_that_an_operator_added(chart: Path) -> None:
    secrets = of_kind(upgrade(chart, NAMES)[0], "Secret")
    assert secrets["chat-pdserve-secret"]["data"] == {"secret": _encoded("shared")}
    assert secrets["chat-pdserve-keys"]["data"]["keys.yaml"] == _encoded("tenants: {mine: {}}")
    assert "stringData" not in secrets["chat-pdserve-keys"]
    assert secrets["chat-pdserve-tls"]["data"]["tls.crt"] == _encoded("certificate")


def test_other_names_than_those_of_the_kept_certificate_are_refused(chart: Path) -> None:
    _, error = upgrade(chart, NAMES, "llm.example.com", check=False)
    assert "tls.public.dnsNames: have changed" in error

"""Reads over HTTP what a process shows: its metrics, as Prometheus does, and the live page."""

import json
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from shown_metrics import SHOWN

from pdserve.observe.metrics import Kind
from pdserve.router.frontend.backend import State


class Scraped:
    """What one answer of a process shows."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """Return the sum of all series of a name."""
        return sum(value for (known, _), value in self._values.items() if known == name)

    def assert_complete(self, process: str) -> None:
        """Fail unless this is what such a process shows: each metric, of its kind and with its labels, and no other."""
        own = {name: family for name, family in self.families.items() if name.startswith(("vllm:", "pdserve_"))}
        expected = {}
        for metric in SHOWN[process]:
            name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
            expected[name] = metric.kind.value, set(metric.labels)
        shown = {name: (family.type, _labels(family.samples[0].labels)) for name, family in own.items()}
        assert shown == expected
        assert own.keys() < self.families.keys()  # the process's memory and CPU time


def _labels(labels: dict[str, str]) -> set[str]:
    return set(labels) - {"le"}


def scrape(address: str) -> Scraped:
    """Return what a process shows."""
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return Scraped(answer.read().decode())


def snapshot(url: str, query: str = "") -> State:
    """Return what the live page is sent first."""
    with urlopen(f"{url}/page/events{query}", timeout=10) as stream:
        assert stream.readline() == b"event: snapshot\n"
        state: State = json.loads(stream.readline().removeprefix(b"data: "))
    return state

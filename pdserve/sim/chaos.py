"""What goes wrong, and when."""

from pdserve.sim.cluster import Cluster
from pdserve.sim.scenario import Scenario


class Chaos:
    def __init__(self, cluster: Cluster, scenario: Scenario) -> None:
        self._cluster = cluster

    def stop(self) -> None:
        pass

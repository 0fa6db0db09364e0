"""The policies by name."""

from collections.abc import Callable

from pdserve.router.affinity import PrefixAffinity
from pdserve.router.forecast import Forecast
from pdserve.router.goodput import Goodput
from pdserve.router.placement import Policy, least_loaded, round_robin

POLICIES: dict[str, Callable[[Forecast], Policy]] = {
    "goodput": Goodput,
    "least_loaded": lambda _: least_loaded,
    "prefix_affinity": PrefixAffinity,
    "round_robin": lambda _: round_robin,
}

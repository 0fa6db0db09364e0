"""Workers whose K and V differ in type alone are paired, unless an operator forbids it; then their status says why."""

from dataclasses import replace

import pytest
from router_driver import LAYOUT, Driver

from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.refusal import Cause
from pdserve.router.config import Limits
from pdserve.router.requests.commands import Place

CODED = replace(LAYOUT, dtype="int8")
STATES = (KvGroup("state", 2, 1, LAYOUT.head_dim, 1, 2, 2, 64),)


def unroutable(d: Driver) -> dict[str, str]:
    """Return what the status of the workers says, by name."""
    return {d.core.workers.known(link).name: why for link, why in d.core.membership.unroutable().items()}


def arrived(prefill: KvLayout, decode: KvLayout, *, converts_kv: bool = True) -> Driver:
    """Return a driver of a prefill and a decode worker of these layouts, at which a request has arrived."""
    d = Driver(limits=Limits(converts_kv=converts_kv, pool_grace_s=0.0))
    d.attach("p0", layout=prefill)
    d.attach("d0", layout=decode)
    d.arrive()
    return d


@pytest.mark.parametrize(("prefill", "decode"), [(LAYOUT, CODED), (CODED, LAYOUT), (CODED, CODED)])
def test_types_of_k_and_v_may_differ(prefill: KvLayout, decode: KvLayout) -> None:
    d = arrived(prefill, decode)
    (place,) = [command for command in d.last if isinstance(command, Place)]
    assert (place.prefill.worker_id, place.decode.worker_id) == ("p0", "d0")
    assert unroutable(d) == {"p0": "", "d0": ""}


def test_an_operator_may_forbid_it_and_status_names_type_and_setting() -> None:
    d = arrived(LAYOUT, CODED, converts_kv=False)
    why = f"dtype: {LAYOUT.dtype} != int8, and converts_kv is off"
    assert unroutable(d) == {
        "p0": f"no compatible decode worker: {why}",
        "d0": f"no compatible prefill worker: {why}",
    }
    assert not [command for command in d.last if isinstance(command, Place)]
    assert [(end.cause, end.message) for end in d.ends.values()] == [(Cause.NO_PAIR, f"no compatible pair: {why}")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights_hash": "another type of computing"}, "weights_hash"),
        ({"page_size": 2 * LAYOUT.page_size}, "page_size"),
        ({"page_digest": "splitmix64"}, "page_digest"),
        ({"kv_parts": 1}, "kv_parts"),
    ],
)
@pytest.mark.parametrize("converts_kv", [True, False])
def test_nothing_else_may_differ(change: dict[str, object], field: str, *, converts_kv: bool) -> None:
    d = arrived(LAYOUT, replace(LAYOUT, **change), converts_kv=converts_kv)  # type: ignore[arg-type]
    assert all(f"worker: {field}: " in why for why in unroutable(d).values())
    assert not [command for command in d.last if isinstance(command, Place)]


@pytest.mark.parametrize("change", [{"kv_parts": 1}, {"others": STATES}, {"page_digest": "splitmix64"}])
def test_latent_rows_states_and_pages_of_a_gpu_are_never_converted(change: dict[str, object]) -> None:
    theirs = replace(LAYOUT, **change)  # type: ignore[arg-type]
    d = arrived(theirs, replace(theirs, dtype="int8"))
    assert all(f"worker: dtype: {LAYOUT.dtype} != int8" in why for why in unroutable(d).values())

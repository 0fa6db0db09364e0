"""Messages of admin.proto as values that processes exchange, and back."""

from typing import Any

from pdserve.base.errors import ProtocolError
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.reports import NUM_BANDS, Demand

_BANDS = ("prompts", "answers")
_PARTS = tuple(admin.Demand.DESCRIPTOR.fields_by_name)


def demand_to_proto(demand: Demand) -> admin.Demand:
    return admin.Demand(**{name: getattr(demand, name) for name in _PARTS})


def demand_from_proto(message: admin.Demand) -> Demand:
    """Return what a router has counted; ProtocolError if it counts in other bands."""
    parts: dict[str, Any] = {name: getattr(message, name) for name in _PARTS}
    for name in _BANDS:
        parts[name] = tuple(parts[name])
        if len(parts[name]) != NUM_BANDS:
            raise ProtocolError(f"demand.{name}: {len(parts[name])} bands, {NUM_BANDS} are expected")
    return Demand(**parts)

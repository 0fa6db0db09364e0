"""Roles on the wire, by their numbers in link.proto."""

from pdserve.proto.v1 import link_pb2 as link
from pdserve.roles import Role

ROLES = {link.Role.Value(f"ROLE_{role.name}"): role for role in Role}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}

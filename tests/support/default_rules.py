"""The rules of a decode worker whose operator has set nothing."""

from dataclasses import replace

from pdserve.base.roles import Role
from pdserve.settings.config import WorkerConfig
from pdserve.worker.admission import Rules


def default_rules(**changes: object) -> Rules:
    """Return those rules, with room for 64 requests, of a decode worker, but for what is changed."""
    default = {name: field.default for name, field in WorkerConfig.model_fields.items()}
    share, lease_s = default["max_quarantined_share"], default["lease_s"]
    rules = Rules(64, default["digests"] == "always", share, lease_s, Role.DECODE)
    return replace(rules, **changes)  # type: ignore[arg-type]

"""What Kubernetes asks a process: grpc.health.v1 on its health port."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from looking import until

from pdserve.launch.folder import free_port

SERVICES = ("live", "started", "ready")


def health_flags() -> dict[str, object]:
    """Return the flags of a process whose health is served on a port that is known beforehand."""
    return {"health_port": free_port("127.0.0.1")}


def probe(port: object, service: str, timeout_s: float = 2.0) -> bool | None:
    """Return whether a service is SERVING; None where nobody answers in time."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            raise
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def served(port: object) -> list[str]:
    """Return the services that are SERVING."""
    return [service for service in SERVICES if probe(port, service)]


def until_served(port: object, services: list[str], within_s: float = 60.0) -> None:
    """Probe again and again, as the kubelet does, until just these services are SERVING."""
    until(lambda: served(port) == services, within_s, lambda: served(port))

"""A live cluster that was started with `--tls`."""

import grpc
from live_cluster import LiveCluster

from pdserve.net.certificates import IDENTITY_FILES, Part
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub


class TlsCluster(LiveCluster):
    """Speaks to it by TLS: as a client, and as its operator."""

    def __init__(self, plain: LiveCluster) -> None:
        super().__init__(plain.process, plain._folder, plain._name)
        self.close()
        identity_dir = self.state.identity_dir
        assert identity_dir is not None
        self.certificates = identity_dir.parent
        self.channel = self.dial(self.endpoint)
        self.inference = InferenceServiceStub(self.channel)
        self._admin_channel = self.dial(self.state.admin, Part.OPERATOR)
        self.admin = AdminServiceStub(self._admin_channel)

    def dial(self, address: str, part: Part | None = None, listener: Part = Part.ROUTER) -> grpc.Channel:
        """Dial as a client, or another process as one with a part."""
        authority = (self.certificates / "ca.crt").read_bytes()
        if part is None:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
        certificate, key, _ = ((self.certificates / part / name).read_bytes() for name in IDENTITY_FILES)
        shown = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, shown, [("grpc.ssl_target_name_override", listener.host)])

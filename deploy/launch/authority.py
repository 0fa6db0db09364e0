"""A certificate authority for one cluster, where nothing else makes certificates for its processes."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.base.errors import ConfigError
from pdserve.base.files import read_file, read_private, write_atomically
from pdserve.net.certificates import IDENTITY_FILES, PUBLIC, Part

AUTHORITY_DAYS = 3650
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
PRIVATE = 0o600  # mode of files
_SKEW = timedelta(hours=1)  # of the clocks of machines that check


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls) -> Self:
        """Make one."""
        key, lifetime = ec.generate_private_key(ec.SECP256R1()), timedelta(days=AUTHORITY_DAYS)
        builder = _builder("pdserve cluster", "pdserve cluster", key, lifetime)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the one that `write` wrote; ConfigError where there is none."""
        certificate, key = folder / "ca.crt", folder / "ca.key"
        try:
            loaded = serialization.load_pem_private_key(read_private(key, "certs"), None)
            if not isinstance(loaded, ec.EllipticCurvePrivateKey):
                raise ConfigError(f"certs: {key} was not written by pdserve")
            return cls(x509.load_pem_x509_certificate(read_file(certificate, "certs")), loaded)
        except ValueError as error:
            raise ConfigError(f"certs: {folder} holds no authority: {error}") from error

    @property
    def pem(self) -> bytes:
        """The certificate that others have to trust."""
        return _pem(self.certificate)

    def write(self, folder: Path) -> None:
        """Write certificate and key."""
        write_atomically(folder / "ca.crt", self.pem, PRIVATE)
        write_atomically(folder / "ca.key", _key_pem(self.key), PRIVATE)

    def write_identity(self, folder: Path, part: Part, trust_domain: str, lifetime: timedelta) -> None:
        """Make what a process with that part shows inside the cluster; a folder as `identity_dir` names one."""
        names = [x509.UniformResourceIdentifier(part.uri(trust_domain)), x509.DNSName(part.host)]
        self._write_pair(folder, str(part), names, lifetime)
        write_atomically(folder / IDENTITY_FILES[2], self.pem, PRIVATE)

    def write_public(self, folder: Path, hosts: Sequence[str], lifetime: timedelta) -> None:
        """Make what a router shows to clients, who reach it by any of these names and addresses."""
        self._write_pair(folder, "pdserve", [_name(host) for host in hosts], lifetime)

    def _write_pair(self, folder: Path, subject: str, names: list[x509.GeneralName], lifetime: timedelta) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, str(issuer), key, lifetime)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / IDENTITY_FILES[0], _pem(builder.sign(self.key, hashes.SHA256())), PRIVATE)
        write_atomically(folder / IDENTITY_FILES[1], _key_pem(key), PRIVATE)


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Write an authority and what all processes of a cluster show: a folder for each part, and one for clients.

    An authority that is there already signs these too, so that running processes go on trusting each other.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / "ca.key").exists():
        authority = Authority.read(folder)
    else:
        authority = Authority.new()
        authority.write(folder)
    for part in Part:
        authority.write_identity(folder / part, part, "pdserve", timedelta(days=days))
    authority.write_public(folder / PUBLIC, (*LOCAL_HOSTS, *hosts), timedelta(days=days))


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    ends = datetime.now(UTC) + lifetime
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends) - _SKEW)
        .not_valid_after(ends)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host: {host!r} is no name of a host: {error}") from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.NoEncryption())

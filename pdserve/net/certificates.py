"""Certificates of a cluster's processes: what they must contain, and how they are read.

A certificate names the part of its process in the cluster: router, worker or operator. The subject alternative names
have the part twice. Listeners read a caller's part from the URI spiffe://TRUST-DOMAIN/pdserve/PART. Callers expect a
listener with the DNS name PART.pdserve.internal.
"""

import re
import ssl
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from cryptography import x509

from pdserve.base.errors import ConfigError
from pdserve.base.files import read_file, read_private

IDENTITY_FILES = ("tls.crt", "tls.key", "ca.crt")
PUBLIC = "public"  # folder of the certificate for clients, beside those of the parts


class Part(StrEnum):
    """What a process is in its cluster."""

    ROUTER = "router"
    WORKER = "worker"
    FRONTEND = "frontend"
    OPERATOR = "operator"  # launches, inspects or changes the cluster

    @property
    def host(self) -> str:
        """The DNS name that callers expect of a listener with this part."""
        return f"{self}.pdserve.internal"

    def uri(self, trust_domain: str) -> str:
        """Return the URI by which listeners recognise a caller with this part."""
        return f"spiffe://{trust_domain}/pdserve/{self}"


_URI = re.compile(rf"spiffe://([^/]+)/pdserve/({'|'.join(Part)})")

CALLERS = {
    "/pdserve.v1.LinkService/": {Part.WORKER},
    "/pdserve.v1.FrontendService/": {Part.FRONTEND},
    "/pdserve.v1.HandoffService/": {Part.WORKER},
    "/pdserve.v1.NodeService/": {Part.WORKER},
    "/pdserve.v1.AdminService/": {Part.OPERATOR},
    "/pdserve.v1.LauncherService/": {Part.OPERATOR},
    "/pdserve.v1.Identity/": set(Part),
}
"""Which parts may call methods that begin with each prefix. Nobody may call other methods."""


def may_call(part: Part | None, method: str) -> bool:
    """Return whether a caller of this part may call a method, /package.service/name."""
    return any(method.startswith(prefix) and part in parts for prefix, parts in CALLERS.items())


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its chain, and its private key, as PEM."""

    certificate: bytes
    key: bytes
    expires: datetime


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's certificate inside its cluster, and the authority that it trusts."""

    pair: KeyPair
    authority: bytes  # certificates of the authority that signed those of all others, as PEM
    trust_domain: str
    part: Part

    def part_of(self, uri: str) -> Part | None:
        """Return the part of this cluster that a certificate's URI names, None if it names none."""
        return next((part for part in Part if part.uri(self.trust_domain) == uri), None)


def read_pair(certificate: Path, key: Path, settings: tuple[str, str]) -> KeyPair:
    """Return a certificate and its key; ConfigError names the setting, of the two, whose file is refused."""
    chain, private = read_file(certificate, settings[0]), read_private(key, settings[1])
    first = _certificates(chain, certificate, settings[0])[0]
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{settings[1]}: {key} is not the key of {certificate}: {error}") from error
    return KeyPair(chain, private, first.not_valid_after_utc)


def public_files(folder: Path) -> tuple[Path, Path]:
    """Return certificate and key for clients, in a folder of certificates for a whole cluster."""
    return folder / PUBLIC / IDENTITY_FILES[0], folder / PUBLIC / IDENTITY_FILES[1]


def read_identity(folder: Path) -> Identity:
    """Read a folder with tls.crt, tls.key and ca.crt; ConfigError unless they are an identity in a cluster."""
    certificate, key, authority = (folder / name for name in IDENTITY_FILES)
    pair = read_pair(certificate, key, ("identity_dir", "identity_dir"))
    believed = read_file(authority, "identity_dir")
    _certificates(believed, authority, "identity_dir")
    own = _certificates(pair.certificate, certificate, "identity_dir")[0]
    uris, hosts = _names(own)
    found = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if found is None:
        text = f"must name one URI, spiffe://TRUST-DOMAIN/pdserve/PART, and names {uris or 'none'}"
        raise ConfigError(f"identity_dir: {certificate} {text}")
    trust_domain, part = found[1], Part(found[2])
    if part.host not in hosts:
        raise ConfigError(f"identity_dir: {certificate} must name the host {part.host}, and names {hosts or 'none'}")
    return Identity(pair, believed, trust_domain, part)


def _certificates(pem: bytes, path: Path, setting: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} holds no certificate: {error}") from error


def _names(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], []
    return names.get_values_for_type(x509.UniformResourceIdentifier), names.get_values_for_type(x509.DNSName)

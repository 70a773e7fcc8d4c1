"""Certificates of a fleet: an authority of its own, and the server's, which it signs.

Devices trust this authority alone. All keys are of the elliptic curve P-384.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from anyfleet.errors import ConfigError, Problem

LOCAL = ("localhost", "127.0.0.1")  # the names of the SuperLink, which uses the same certificate
AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
_EARLY = timedelta(days=1)  # for devices whose clock is behind


@dataclass(frozen=True)
class Credentials:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


def make_authority(now: datetime | None = None) -> Credentials:
    """Make an authority that signs certificates of servers, and nothing else."""
    key, now = ec.generate_private_key(ec.SECP384R1()), now or datetime.now(UTC)
    subject = _name("Anyfleet fleet authority")
    certificate = (
        _draft(subject, subject, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return _written(certificate, key)


def make_server(
    authority: Credentials, hosts: Sequence[str], *, days: int, now: datetime | None = None
) -> Credentials:
    """Make the certificate of a server with these names and addresses, and those of loopback.

    It is valid for so many days, but not longer than the authority's.
    """
    if not 1 <= days <= AUTHORITY_DAYS:
        told = f"must be from 1 to {AUTHORITY_DAYS}, got {days}."
        raise ConfigError([Problem("days", told)])
    key, now = ec.generate_private_key(ec.SECP384R1()), now or datetime.now(UTC)
    root, signer = read_certificate(authority.certificate), read_key(authority.key)
    names = x509.SubjectAlternativeName(list(map(_alternative, dict.fromkeys((*hosts, *LOCAL)))))
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    longest = (root.not_valid_after_utc - now).days
    certificate = (
        _draft(root.subject, _name(hosts[0]), key.public_key(), now, min(days, longest))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(server, critical=False)
        .add_extension(names, critical=False)
        .add_extension(identifier, critical=False)
        .sign(signer, hashes.SHA384())
    )
    return _written(certificate, key)


def _draft(
    issuer: x509.Name,
    subject: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common: str) -> x509.Name:
    # A common name has at most 64 characters; names that are checked are the alternative ones.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _written(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Credentials:
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, form, none)
    return Credentials(certificate.public_bytes(serialization.Encoding.PEM), private)


# --- reading ------------------------------------------------------------------------------------


def read_certificate(content: bytes) -> x509.Certificate:
    """Return a certificate from PEM; raise ValueError if it is none."""
    return x509.load_pem_x509_certificate(content)


def read_key(content: bytes) -> ec.EllipticCurvePrivateKey:
    """Return a private key from PEM; raise ValueError if it is none of an elliptic curve."""
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError as error:
        raise ValueError("the key has a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not one of an elliptic curve")
    return key


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    names = found.get_values_for_type(x509.DNSName)
    return (*names, *map(str, found.get_values_for_type(x509.IPAddress)))


def faults(root: bytes, server: Credentials, host: str, now: datetime) -> Iterator[str]:
    """Yield what is wrong with a server's certificate, for devices that connect to this host."""
    try:
        authority = read_certificate(root)
        certificate, key = read_certificate(server.certificate), read_key(server.key)
    except ValueError as error:
        yield f"a certificate or its key cannot be read: {error}"
        return
    for name, each in (("ca.crt", authority), ("server.crt", certificate)):
        if each.not_valid_before_utc > now:
            yield f"{name} is valid only from {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        if each.not_valid_after_utc <= now:
            yield f"{name} has expired on {each.not_valid_after_utc:%Y-%m-%d}"
    if key.public_key() != certificate.public_key():
        yield "server.key is not the key of server.crt"
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        yield "server.crt is not signed by ca.crt"
    missing = [each for each in (host, *LOCAL) if each not in hosts_of(certificate)]
    if missing:
        yield f"server.crt is not for {', '.join(missing)}"

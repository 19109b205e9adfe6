"""A throw-away authority, and what it vouches for on the loopback address."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path

HOUR = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Files:
    """PEM files: who vouches, a certificate of localhost, and its key."""

    ca: Path
    cert: Path
    key: Path


def issue(folder):
    """An authority of its own, and one certificate for servers and clients on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = _name(f"authority of {folder.name}"), _name("localhost")
    ca = _builder(ca_name, ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    cert = _builder(name, ca_name, key.public_key())
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    cert = cert.add_extension(x509.SubjectAlternativeName(places), critical=False)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    cert = cert.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    files = Files(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    pem = serialization.Encoding.PEM
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.cert.write_bytes(cert.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject, issuer, public_key):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - HOUR)
        .not_valid_after(now + 24 * HOUR)
    )

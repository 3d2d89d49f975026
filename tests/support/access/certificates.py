"""Certificates for tests: a CA and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """Signs certificates for 127.0.0.1; writes PEM files into `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._build(self._name, self._key.public_key(), is_ca=True)
        self.path = self._write(f"{name}.pem", self._certificate)

    @property
    def pem(self) -> bytes:
        return self.path.read_bytes()

    def issue(self, name: str, *dns_names: str) -> tuple[Path, Path]:
        """Gives the files of a certificate, also for `dns_names`, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(_name(name), key.public_key(), *dns_names, is_ca=False)
        key_path = self.folder / f"{name}.key"
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return self._write(f"{name}.pem", certificate), key_path

    def _build(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        *dns_names: str,
        is_ca: bool,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        names = x509.SubjectAlternativeName(
            [
                *(x509.DNSName(name) for name in ("localhost", *dns_names)),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            ]
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def credentials(ca: bytes, pair=None) -> grpc.ChannelCredentials:
    if pair is None:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(ca, pair[1].read_bytes(), pair[0].read_bytes())

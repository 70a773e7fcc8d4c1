"""A real SuperLink on loopback for tests: certificates, keys, and the process."""

import datetime as dt
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOST = "127.0.0.1"


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def public_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A public key as a device writes it: one line in OpenSSH's form."""
    form = serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, form)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    common = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, "ca")]
    address = x509.IPAddress(ipaddress.ip_address(HOST))
    build = (
        x509.CertificateBuilder()
        .subject_name(common[0])
        .issuer_name(common[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
    )
    if name != "ca":
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        build = build.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        build = build.add_extension(usage, critical=False)
    return build.sign(signer, hashes.SHA384())


def make_certificates() -> tuple[bytes, bytes, bytes]:
    """The certificate of an authority, a server's certificate that it signed, and its key."""
    ca_key, server_key = make_key(), make_key()
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    ca = _certificate("ca", ca_key, ca_key).public_bytes(pem)
    return ca, _certificate("server", server_key, ca_key).public_bytes(pem), private


class SuperLink:
    """A SuperLink with TLS, node keys and SQLite, whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"{HOST}:{free_port()}"
        self.ca, server, private = make_certificates()
        self.secret = os.urandom(32).hex().encode()
        files = {"ca.crt": self.ca, "server.crt": server, "server.key": private}
        for name, content in (files | {"executor.secret": self.secret}).items():
            (folder / name).write_bytes(content)
        self.start()

    def start(self) -> None:
        """Start the process, and return when it accepts connections."""
        host, port = self.address.split(":")
        command = [
            str(Path(sys.executable).with_name("flower-superlink")),
            *("--ssl-ca-certfile", "ca.crt"),
            *("--ssl-certfile", "server.crt"),
            *("--ssl-keyfile", "server.key"),
            "--enable-supernode-auth",
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", "executor.secret"),
            "--disable-runtime-dependency-installation",
            *("--host", host, "--port", port),
            *("--database", "link.db"),
        ]
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **quiet, "FLWR_HOME": str(self.folder)},
                stdout=log,
                stderr=log,
            )
        while True:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the process as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

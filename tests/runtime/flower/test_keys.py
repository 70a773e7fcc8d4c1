"""Keys of devices: made once, private, and checked before they are believed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from anyfleet.errors import ConfigError
from anyfleet.runtime.flower.keys import (
    device_key,
    fingerprint,
    load_private,
    load_public,
    public_pem,
    public_text,
)


def test_a_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "device.key"
    made = device_key(file)
    assert device_key(file).private_numbers() == made.private_numbers()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device.key", "device.pub"]
    assert file.stat().st_mode & 0o777 == 0o600
    public = load_public((tmp_path / "device.pub").read_text())
    assert public == made.public_key()
    (tmp_path / "device.pub").unlink()
    device_key(file)
    assert load_public((tmp_path / "device.pub").read_text()) == public


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_fingerprint_is_that_of_ssh(tmp_path: Path) -> None:
    key = device_key(tmp_path / "device.key")
    words = ["ssh-keygen", "-l", "-f", str(tmp_path / "device.pub")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == fingerprint(key.public_key())


def test_a_fingerprint_belongs_to_a_key() -> None:
    text = (
        "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBKqHyiK+i1N0jvMgrT"
        "rHRrGLi49TyBUlVWv5gtsAz1T+d/k1WFwN9Vm0Kdz0Bbd/zOBVAt0E7iYJq1KQ"
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        load_public(text)  # cut off
    one, other = (ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(2))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(load_public(f"{public_text(one)} somebody@device")) == fingerprint(one)
    assert public_pem(one).startswith(b"-----BEGIN PUBLIC KEY-----")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "device.key"
    device_key(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others .* chmod 600"):
        load_private(file)


def test_what_is_no_private_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "device.key"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_private(file)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    other = ec.generate_private_key(ec.SECP256R1())
    for content in (b"nonsense", other.private_bytes(*form, serialization.NoEncryption())):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=r"device\.key"):
            load_private(file)


def test_what_is_no_public_key_is_refused(tmp_path: Path) -> None:
    device_key(tmp_path / "device.key")
    private = (tmp_path / "device.key").read_text()
    with pytest.raises(ConfigError, match="stays on its device"):
        load_public(private)
    good = (tmp_path / "device.pub").read_text()
    ssh = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*ssh).decode()
    for text in ("", "nonsense", good * 2, other, "ecdsa-sha2-nistp384 ####", "é" + good):
        with pytest.raises(ConfigError):
            load_public(text)

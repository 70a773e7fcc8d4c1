"""Keys of devices: who a device is, for the server. Elliptic curve P-384, in OpenSSH form.

A device makes its own key; the private half stays in its file, the public half is enrolled at the
server. A fingerprint is what `ssh-keygen -l` shows of the public half.
"""

import base64
import hashlib
import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from anyfleet.errors import ConfigError, Problem

_MOST_TEXT = 4096  # characters of a public key, with its comment
_KIND = "ecdsa-sha2-nistp384"


def device_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file; make it first, with its public half beside it, if absent.

    The public half is in `device.pub` if the file is `device.key`; it is written anew if missing.
    """
    if not path.exists():
        content = ec.generate_private_key(ec.SECP384R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        _create(path, content)
    key = load_private(path)
    public = path.with_suffix(".pub")
    if not public.exists():
        line = f"{public_text(key.public_key())}\n"
        _create(public, line.encode("ascii"), permissions=0o644)
    return key


def _create(path: Path, content: bytes, permissions: int = 0o600) -> None:
    """Write a new file, as a whole or not at all; another process may be first, or wait for it.

    Nobody else can read it, unless the permissions say so.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    with os.fdopen(opened, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    try:
        os.link(beside, path)  # fails, unlike a renaming, if there is a key by now
    except FileExistsError:
        pass
    finally:
        beside.unlink()


def load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file; raise ConfigError if it is none, or others can read it."""
    try:
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}.") from error
    if os.name == "posix" and mode & 0o077:
        raise _wrong(
            path, f"others on this machine can read it (mode {mode:o}). Run: chmod 600 {path}"
        )
    try:
        key = serialization.load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        advice = "Remove it to have a new one made, and enrol its public half."
        raise _wrong(path, f"is not a private key in OpenSSH form. {advice}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not _fits(key.curve):
        raise _wrong(path, f"is a key of another kind; {_KIND} is due.")
    return key


def load_public(text: str) -> ec.EllipticCurvePublicKey:
    """Return a public key from its text ("ecdsa-sha2-nistp384 AAAA…"); raise ConfigError if wrong.

    The text of a private key is refused, with the advice to keep that one on its device.
    """
    text = text.strip()
    if "PRIVATE KEY" in text:
        raise _wrong("key", "this is a private key, which stays on its device: give device.pub.")
    if not text.isascii() or len(text) > _MOST_TEXT or "\n" in text or not text.startswith(_KIND):
        raise _wrong("key", f"is not one line that begins with {_KIND}: give device.pub.")
    try:
        key = serialization.load_ssh_public_key(text.encode("ascii"))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _wrong(
            "key", f"cannot be read: {error}. Copy the whole line of device.pub."
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _fits(key.curve):
        raise _wrong("key", f"is a key of another kind; {_KIND} is due.")
    return key


def public_text(public: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as its one line of text, without a comment."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return public.public_bytes(encoding, form).decode("ascii")


def public_pem(public: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM, the form in which Flower registers and compares it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(serialization.Encoding.PEM, form)


def fingerprint(public: ec.EllipticCurvePublicKey) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` prints it: "SHA256:…"."""
    blob = base64.b64decode(public_text(public).split()[1])
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii")
    return f"SHA256:{digest.rstrip('=')}"


def _fits(curve: ec.EllipticCurve) -> bool:
    return isinstance(curve, ec.SECP384R1)


def _wrong(where: Path | str, what: str) -> ConfigError:
    return ConfigError([Problem(str(where), what)])

"""The folder of a fleet: its certificates, what makes it whole, and who is in its roster."""

import os
import ssl
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import anyfleet
from anyfleet.deployment.certificates import (
    Credentials,
    faults,
    hosts_of,
    make_authority,
    make_server,
    read_certificate,
)
from anyfleet.deployment.fleet_folder import (
    Address,
    FleetFolder,
    make_fleet,
    open_fleet,
    renew_certificate,
)
from anyfleet.deployment.roster import Roster, enrol, read_roster, record_node, revoke
from anyfleet.errors import ConfigError, StoreError
from anyfleet.runtime.flower.keys import public_text
from anyfleet.store.disk import Lock


def new_key() -> str:
    return public_text(ec.generate_private_key(ec.SECP384R1()).public_key())


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    made = make_fleet(tmp_path / "fleet", Address.read("fleet.example.org:9443"), allow=["mine"])
    made.bundle.mkdir()
    return made


# --- the folder -------------------------------------------------------------------------------


def test_a_new_folder_is_whole_and_private(folder: FleetFolder) -> None:
    folder.check()
    modes = {each.name: each.stat().st_mode & 0o777 for each in folder.path.iterdir()}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    private = ("ca.key", "server.key", "executor.secret", "roster.toml")
    assert [modes[name] for name in private] == [0o600] * 4
    assert len(folder.secret.read_bytes()) >= 32
    said = tomllib.loads((folder.device / "fleet.toml").read_text())
    version = anyfleet.__version__
    assert said == {"address": "fleet.example.org:9443", "anyfleet": version, "allow": ["mine"]}
    assert folder.device_file().address == Address("fleet.example.org", 9443)


def test_devices_get_no_secret(folder: FleetFolder) -> None:
    secrets = [each.read_bytes() for each in (folder.authority_key, folder.key, folder.secret)]
    given = [each.read_bytes() for each in folder.device.rglob("*") if each.is_file()]
    assert len(given) == 2
    assert not any(secret in each for secret in secrets for each in given)
    assert not any(b"PRIVATE" in each for each in given)


def test_a_folder_that_is_not_empty_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        make_fleet(tmp_path, Address("localhost", 1))
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_all_problems_of_a_folder_are_told_at_once(folder: FleetFolder) -> None:
    folder.certificate.unlink()
    folder.secret.unlink()
    folder.key.chmod(0o644)
    folder.path.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        folder.check()
    named = [Path(each.path).name for each in caught.value.problems]
    assert named == ["server.crt", "executor.secret", "fleet", "server.key"]
    assert "chmod 600" in str(caught.value)


def test_what_is_no_fleet_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not the folder of a fleet"):
        open_fleet(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        FleetFolder(tmp_path / "none").check()


@pytest.mark.parametrize(
    ("text", "host", "listens", "again"),
    [
        ("Fleet.Example.org:443", "fleet.example.org", "0.0.0.0", "fleet.example.org:443"),
        ("localhost:9443", "localhost", "127.0.0.1", "localhost:9443"),
        ("192.0.2.1:80", "192.0.2.1", "0.0.0.0", "192.0.2.1:80"),
        ("[2001:DB8::1]:80", "2001:db8::1", "::", "[2001:db8::1]:80"),
        ("[::1]:80", "::1", "::1", "[::1]:80"),
    ],
)
def test_an_address(text: str, host: str, listens: str, again: str) -> None:
    found = Address.read(text)
    assert (found.host, found.listens, str(found)) == (host, listens, again)
    assert Address.read(str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:0", "host:65536", ":80", "a b:80", "https://h:80", "-h:1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.read(text)


# --- certificates -----------------------------------------------------------------------------


def test_a_client_of_the_authority_accepts_the_server(folder: FleetFolder) -> None:
    """Both ends of TLS in memory, with the strictest checks that Python has."""
    client = ssl.create_default_context(cafile=str(folder.device / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder.certificate, folder.key)
    for host in ("fleet.example.org", "localhost", "127.0.0.1"):
        shake_hands(client, server, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(client, server, "other.example.org")


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    ]
    while ends:
        for each in list(ends):
            try:
                each.do_handshake()
                ends.remove(each)
            except ssl.SSLWantReadError:
                continue


def test_faults_of_certificates() -> None:
    now = datetime.now(UTC)
    authority = make_authority()
    good = make_server(authority, ["a.org", "192.0.2.1"], days=10)
    root = authority.certificate
    assert list(faults(root, good, "a.org", now)) == []
    assert hosts_of(read_certificate(good.certificate)) == (
        "a.org",
        "localhost",
        "192.0.2.1",
        "127.0.0.1",
    )
    assert "not for b.org" in "".join(faults(root, good, "b.org", now))
    assert "has expired" in "".join(faults(root, good, "a.org", now + timedelta(days=11)))
    assert "valid only from" in "".join(faults(root, good, "a.org", now - timedelta(days=9)))
    other = make_server(authority, ["a.org"], days=10)
    assert "not the key" in "".join(faults(root, replace(good, key=other.key), "a.org", now))
    stranger = make_authority().certificate
    assert "not signed" in "".join(faults(stranger, good, "a.org", now))
    assert "cannot be read" in "".join(faults(root, Credentials(b"", b""), "a.org", now))


def test_no_certificate_outlives_its_authority() -> None:
    then = datetime.now(UTC) - timedelta(days=3600)
    authority = make_authority(then)
    server = read_certificate(make_server(authority, ["a.org"], days=825).certificate)
    root = read_certificate(authority.certificate)
    assert server.not_valid_after_utc <= root.not_valid_after_utc
    for days in (0, 3651):
        with pytest.raises(ConfigError, match="days"):
            make_server(authority, ["a.org"], days=days)


def test_a_renewed_certificate_is_of_the_same_authority(folder: FleetFolder) -> None:
    before = folder.certificate.read_bytes()
    renew_certificate(folder, days=20)
    assert folder.certificate.read_bytes() != before
    root, now = folder.authority.read_bytes(), datetime.now(UTC)
    assert list(faults(root, folder.server(), "fleet.example.org", now)) == []
    folder.check()


# --- the roster -------------------------------------------------------------------------------


def test_numbers_stay_for_ever(folder: FleetFolder) -> None:
    first, second, third = (new_key() for _ in range(3))
    file = folder.roster
    assert enrol(file, "ada", first).number == 0
    assert enrol(file, "zoe", second).number == 1
    assert revoke(file, "ada").state == "revoked"
    assert enrol(file, "ada", third).number == 2
    found = read_roster(file)
    assert [(each.number, each.name, each.state) for each in found.members] == [
        (0, "ada", "revoked"),
        (1, "zoe", "enrolled"),
        (2, "ada", "enrolled"),
    ]
    assert [each.key for each in found.enrolled] == [second, third]
    assert file.stat().st_mode & 0o777 == 0o600


def test_nobody_is_enrolled_twice(folder: FleetFolder) -> None:
    file, key = folder.roster, new_key()
    enrol(file, "ada", key)
    with pytest.raises(ConfigError, match="is that of device 0"):
        enrol(file, "zoe", f"{key} with a comment")
    with pytest.raises(ConfigError, match="'ada' is device 0 already"):
        enrol(file, "ada", new_key())
    revoke(file, "ada")
    with pytest.raises(ConfigError, match="for ever"):
        enrol(file, "zoe", key)
    with pytest.raises(ConfigError, match="not enrolled"):
        revoke(file, "ada")
    for name in ("", "a b", "../a", "-a", "x" * 65, "a\n"):
        with pytest.raises(ConfigError, match="letters"):
            enrol(file, name, new_key())
    assert len(read_roster(file).members) == 1


def test_an_id_of_a_node_is_kept(folder: FleetFolder) -> None:
    enrol(folder.roster, "ada", new_key())
    largest = 2**64 - 1  # beyond the numbers of TOML
    record_node(folder.roster, 0, largest)
    assert read_roster(folder.roster).members[0].node == largest


def test_changes_at_the_same_time_are_all_kept(folder: FleetFolder) -> None:
    keys = [new_key() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        members = list(pool.map(lambda n: enrol(folder.roster, f"d{n}", keys[n]), range(8)))
    assert sorted(each.number for each in members) == list(range(8))
    assert {each.key for each in read_roster(folder.roster).members} == set(keys)


def test_a_roster_held_by_another_is_told(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyfleet.deployment.roster._PATIENCE", 0.0)
    held = Lock(folder.path, "roster.lock")
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        enrol(folder.roster, "ada", new_key())
    held.release()
    enrol(folder.roster, "ada", new_key())


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("number = 1", "number = 3", r"devices\[1\].*neither moved nor removed"),
        ('name = "zoe"', "name = 3", r"devices\[1\].*name must be a text"),
        ('revoked = ""\n', "", r"devices\[0\].*revoked"),
        ("[[devices]]", "[devices]", "cannot be read"),
        ("ecdsa-sha2-nistp384 A", "ssh-rsa A", r"devices\[0\].*device.pub"),
    ],
)
def test_a_spoilt_roster_is_refused(
    folder: FleetFolder, before: str, after: str, told: str
) -> None:
    for name in ("ada", "zoe"):
        enrol(folder.roster, name, new_key())
    text = folder.roster.read_text()
    assert before in text
    folder.roster.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=told):
        read_roster(folder.roster)


def test_an_empty_roster(folder: FleetFolder) -> None:
    assert read_roster(folder.roster) == Roster()

"""What a check of a fleet's server finds."""

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from anyfleet.deployment import preflight
from anyfleet.deployment.certificates import Credentials, make_server
from anyfleet.deployment.fleet_folder import Address, FleetFolder, make_fleet
from anyfleet.deployment.gate import Gate
from anyfleet.deployment.preflight import Finding, inspect, verdict
from anyfleet.errors import StoreError

SUBJECTS = ("files", "permissions", "certificates", "ports", "clock", "disk", "versions", "roster")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetFolder:
    """A fleet that is well, on a machine whose clock is kept right."""
    monkeypatch.setattr(preflight, "_is_synchronised", lambda: True)
    made = make_fleet(tmp_path / "fleet", Address("127.0.0.1", free_port()))
    made.bundle.mkdir()
    (made.bundle / "tensors").write_bytes(bytes(1000))
    return made


def failures(folder: FleetFolder) -> dict[str, str]:
    return {each.subject: each.told for each in inspect(folder) if each.state == "failed"}


def certify(folder: FleetFolder, days: int, now: datetime) -> None:
    """Give the server a certificate that was made at another time."""
    authority = Credentials(folder.authority.read_bytes(), folder.authority_key.read_bytes())
    server = make_server(authority, ["127.0.0.1"], days=days, now=now)
    folder.certificate.write_bytes(server.certificate)
    folder.key.write_bytes(server.key)


def test_a_fleet_that_is_well(folder: FleetFolder) -> None:
    found = inspect(folder)
    assert verdict(found) == "ok", found
    assert tuple(dict.fromkeys(each.subject for each in found)) == SUBJECTS


def test_the_worst_finding_counts() -> None:
    ok, warning, failed = (Finding("x", state, "") for state in ("ok", "warning", "failed"))
    assert verdict([ok, warning]) == "warning"
    assert verdict([failed, warning, ok]) == "failed"


def test_an_expired_certificate(folder: FleetFolder) -> None:
    certify(folder, days=10, now=datetime.now(UTC) - timedelta(days=11))
    (told,) = failures(folder).values()
    assert "has expired" in told
    assert "anyfleet fleet renew" in told


def test_a_certificate_from_the_future(folder: FleetFolder) -> None:
    certify(folder, days=10, now=datetime.now(UTC) + timedelta(days=5))
    (told,) = failures(folder).values()
    assert "valid only from" in told
    assert "Check the clock" in told


def test_a_certificate_that_expires_soon(folder: FleetFolder) -> None:
    certify(folder, days=10, now=datetime.now(UTC))
    assert verdict(inspect(folder)) == "warning"


def test_a_key_that_everybody_can_read(folder: FleetFolder) -> None:
    folder.key.chmod(0o644)
    assert failures(folder).keys() == {"permissions"}
    assert f"chmod 600 {folder.key}" in failures(folder)["permissions"]


def test_a_port_in_use(folder: FleetFolder) -> None:
    with socket.create_server(("127.0.0.1", folder.device_file().address.port)):
        assert failures(folder).keys() == {"ports"}
        assert "another program uses it" in failures(folder)["ports"]


def test_a_port_in_use_by_its_own_server(folder: FleetFolder) -> None:
    with Gate(folder, "127.0.0.1:1"):
        assert verdict(inspect(folder)) == "ok"


def test_a_clock_that_nobody_keeps_right(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_is_synchronised", lambda: False)
    (found,) = (each for each in inspect(folder) if each.subject == "clock")
    assert (found.state, "may have another time" in found.told) == ("warning", True)


def test_a_disk_without_room(folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_OWN_COPIES", 1 << 60)
    assert failures(folder).keys() == {"disk"}


def test_other_versions(folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.device / "fleet.toml"
    file.write_text(file.read_text().replace('anyfleet = "', 'anyfleet = "9.'))
    assert "9." in failures(folder)["versions"]
    monkeypatch.setattr(preflight, "FLOWER", "0.0.1")
    told = [each.told for each in inspect(folder) if each.subject == "versions"]
    assert len(told) == 2
    assert "Flower 0.0.1 is due" in told[0]


def test_everything_is_looked_at_whatever_is_missing(folder: FleetFolder) -> None:
    folder.certificate.unlink()
    (folder.device / "fleet.toml").unlink()
    (folder.device / "ca.crt").write_text("other")
    folder.roster.write_text("devices = 3")
    found = inspect(folder)
    assert tuple(dict.fromkeys(each.subject for each in found)) == SUBJECTS
    assert failures(folder).keys() == set(SUBJECTS) - {"permissions", "clock"}


def test_what_is_no_fleet(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="fleet init"):
        inspect(FleetFolder(tmp_path))

"""Dockerfile and compose.yaml: what can be checked without Docker."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import unknown_in

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return what is mounted, by where it comes from."""
    return {each.split(":")[0]: each.split(":")[1] for each in service["volumes"]}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    named = {source for source in mounts(service) if not source.startswith(".")}
    assert named <= COMPOSE["volumes"].keys()
    made = re.findall(r"(?<= )/\w+(?= |$)", " ".join(re.findall(r"install -d (.*)", DOCKERFILE)))
    assert {*mounts(service).values()} <= {*made}  # those of the user, not of root


def test_secrets_stay_where_they_belong() -> None:
    assert "fleet" in mounts(SERVICES["server"])
    for name in ("ada", "zoe"):
        assert SERVICES[name]["hostname"] == name
        assert {*mounts(SERVICES[name])} == {name, "handed", "./examples/real_fleet"}


def test_the_commands_exist() -> None:
    lines: list[str] = []
    for service in SERVICES.values():
        script = service["command"][0].replace("$$", "$")
        lines += re.findall(r"\banyfleet [a-z][^;|\n]*", script)
    assert len(lines) == 7
    assert {line: unknown_in(line) for line in lines if unknown_in(line)} == {}
    assert all("device.key" not in line for line in lines)


def test_the_image_runs_as_no_root_and_copies_what_is_there() -> None:
    steps = [line.split() for line in DOCKERFILE.splitlines() if line and line[0].isupper()]
    assert [words[1] for words in steps if words[0] == "USER"] == ["10001:10001"]
    assert steps[-2] == ["ENTRYPOINT", '["anyfleet"]']
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for words in steps if words[0] == "COPY" for name in words[1:-1]]
    assert "src" in copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored

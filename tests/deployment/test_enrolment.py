"""The roster of a fleet that is served."""

from pathlib import Path

import pytest

from anyfleet.deployment import enrolment
from anyfleet.deployment.enrolment import Enrolment
from anyfleet.deployment.roster import enrol
from anyfleet.errors import LinkDown, LinkError
from anyfleet.runtime.flower.keys import device_key


def test_a_device_that_cannot_be_registered_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "roster.toml"
    file.touch()
    for name in ("ada", "bob"):
        device_key(tmp_path / f"{name}.key")
        enrol(file, name, (tmp_path / f"{name}.pub").read_text())
    refused = ["ada"]

    def register(*_: object, name: str, **__: object) -> int:
        if name in refused:
            raise LinkError("the key is in use")
        return len(name)

    monkeypatch.setattr(enrolment, "register_node", register)
    monkeypatch.setattr(enrolment, "node_ids", lambda *_, **__: frozenset())
    found = Enrolment(file, "nowhere:1", b"")
    assert [each.node for each in found.enrolled()] == [None, 3]
    assert found.trouble == "ada: the key is in use"
    refused.clear()
    assert [each.node for each in found.enrolled()] == [3, 3]
    assert [each.node for each in found.enrolled()] == [3, 3]
    assert not found.trouble

    def away(*_: object, **__: object) -> int:
        raise LinkDown("away")

    monkeypatch.setattr(enrolment, "register_node", away)
    device_key(tmp_path / "cy.key")
    enrol(file, "cy", (tmp_path / "cy.pub").read_text())
    with pytest.raises(LinkDown):
        found.enrolled()


def test_a_node_that_the_superlink_has_lost_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "roster.toml"
    file.touch()
    device_key(tmp_path / "ada.key")
    enrol(file, "ada", (tmp_path / "ada.pub").read_text())
    given = iter([7, 8])
    monkeypatch.setattr(enrolment, "register_node", lambda *_, **__: next(given))
    for there, expected in ((frozenset[int](), 7), (frozenset({7}), 7), (frozenset[int](), 8)):
        monkeypatch.setattr(enrolment, "node_ids", lambda *_, found=there, **__: found)
        assert [each.node for each in Enrolment(file, "nowhere:1", b"").enrolled()] == [expected]

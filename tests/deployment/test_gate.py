"""A real SuperLink behind the gate, on loopback: what gets through, what does not, what returns."""

import base64
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now

from anyfleet.deployment.fleet_folder import Address, FleetFolder, make_fleet
from anyfleet.deployment.gate import Gate, GateLimits
from anyfleet.deployment.roster import enrol, record_node, revoke
from anyfleet.deployment.superlink import SuperLink, end_orphan
from anyfleet.errors import LinkError, NotEnrolled, Refusal, StoreError
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.connection import Connection
from anyfleet.runtime.flower.hosting import register_node, unregister_node
from anyfleet.runtime.flower.keys import device_key

PROTOBUF = {"content-type": "application/protobuf"}
LISTEN = ("127.0.0.1", 0)


def fleet_at(path: Path) -> FleetFolder:
    folder = make_fleet(path, Address("127.0.0.1", 9443))
    folder.bundle.mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FleetFolder:
    return fleet_at(tmp_path_factory.mktemp("gate") / "fleet")


@pytest.fixture(scope="module")
def superlink(folder: FleetFolder) -> Iterator[SuperLink]:
    with SuperLink(folder) as started:
        yield started


def post(
    folder: FleetFolder,
    port: int,
    path: str,
    body: bytes | Iterator[bytes] = b"",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str]]:
    """The status and the headers that a request over TLS comes to."""
    authority = ssl.create_default_context(cafile=str(folder.device / "ca.crt"))
    link = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=authority)
    try:
        link.request("POST", path, body, {**PROTOBUF, **(headers or {})})
        response = link.getresponse()
        response.read()
        return response.status, dict(response.getheaders())
    finally:
        link.close()


def open_gate(folder: FleetFolder, superlink: SuperLink, limits: GateLimits | None = None) -> Gate:
    return Gate(folder, superlink.address, limits=limits, listen=LISTEN)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what gets through ------------------------------------------------------------------------


def test_only_the_fleet_api_gets_through(folder: FleetFolder, superlink: SuperLink) -> None:
    with open_gate(folder, superlink) as gate:
        # The SuperLink itself takes orders from anybody with the authority's certificate …
        assert post(folder, superlink.port, "/v1/control/list-runs")[0] == 200
        # … and the gate keeps them out, however they are spelt.
        elsewhere = (
            "/v1/control/list-runs",
            "/v1/runtime/get-nodes",
            "/v1/fleet/../control/list-runs",
            "/v1/fleet/%2e%2e/control/list-runs",
            "/v1/fleet/pull-messages/../../control/list-runs",
            "//v1/fleet/pull-messages",
            "/v1/fleet/pull-messages?x=1",
            "/v1/fleet/",
            "/health",
            "/",
        )
        assert [post(folder, gate.port, path)[0] for path in elsewhere] == [404] * len(elsewhere)
        # A device without a signature reaches the SuperLink, which does not know it.
        status, headers = post(folder, gate.port, "/v1/fleet/pull-messages")
        assert (status, headers["content-type"]) == (401, "application/json")
        assert "date" in headers  # by which a device with another clock signs its next request
        assert gate.counts()["not_found"] == len(elsewhere)
        assert gate.counts()["forwarded"] == 1
        assert gate.counts()["bytes_down"] > 0


def test_a_device_of_the_roster_gets_through(
    folder: FleetFolder, superlink: SuperLink, tmp_path: Path
) -> None:
    key = device_key(tmp_path / "device.key")
    member = enrol(folder.roster, "ada", (tmp_path / "device.pub").read_text())
    ca = folder.authority.read_bytes()
    with open_gate(folder, superlink) as gate:

        def connect() -> int:
            address, home = f"127.0.0.1:{gate.port}", tmp_path / "link"
            with Connection(address, ca=ca, key=key, home=home) as link:
                assert link.receive() is None
                return link.node_id

        with pytest.raises(NotEnrolled):
            connect()
        node = register_node(
            superlink.address, ca=ca, public_key=member.public_key, name=member.name
        )
        assert connect() == node
        record_node(folder.roster, member.number, node)
        for _ in range(2):  # a server that is started again does it again
            unregister_node(superlink.address, ca=ca, node=node)
        with pytest.raises(NotEnrolled):
            connect()
        assert gate.counts()["forwarded"] > 3
    assert revoke(folder.roster, "ada").node == node


def test_an_answer_without_messages_waits_until_some_were_sent(
    folder: FleetFolder, superlink: SuperLink, tmp_path: Path
) -> None:
    key = device_key(tmp_path / "device.key")
    member = enrol(folder.roster, "waiting", (tmp_path / "device.pub").read_text())
    ca = folder.authority.read_bytes()
    register_node(superlink.address, ca=ca, public_key=member.public_key, name=member.name)
    with open_gate(folder, superlink) as gate:
        address = f"127.0.0.1:{gate.port}"
        with Connection(address, ca=ca, key=key, home=tmp_path / "link") as link:
            assert link.receive() is None  # nobody has rung yet: nothing is held back
            gate.ring()
            before = gate.counts()["forwarded"]
            asking = threading.Thread(target=link.receive)
            asking.start()
            until(lambda: gate.counts()["forwarded"] > before)
            asking.join(0.5)
            assert asking.is_alive()
            gate.ring()
            asking.join()


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_device_with_a_wrong_clock_gets_through(
    folder: FleetFolder,
    superlink: SuperLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
) -> None:
    key, ca = device_key(tmp_path / "device.key"), folder.authority.read_bytes()
    public = (tmp_path / "device.pub").read_bytes()
    node = register_node(superlink.address, ca=ca, public_key=public, name="late")
    monkeypatch.setattr(flower_api, "now", lambda: now() + timedelta(hours=hours))
    with open_gate(folder, superlink) as gate:
        address = f"127.0.0.1:{gate.port}"
        with Connection(address, ca=ca, key=key, home=tmp_path / "link") as link:
            assert link.node_id == node
    unregister_node(superlink.address, ca=ca, node=node)


def test_a_stranger_to_the_authority_is_not_trusted(
    folder: FleetFolder, superlink: SuperLink, tmp_path: Path
) -> None:
    other = fleet_at(tmp_path / "other")
    with open_gate(folder, superlink) as gate, pytest.raises(ssl.SSLCertVerificationError):
        post(other, gate.port, "/v1/fleet/pull-messages")


# --- limits -----------------------------------------------------------------------------------


def test_a_body_above_the_limit_is_refused(folder: FleetFolder, superlink: SuperLink) -> None:
    with open_gate(folder, superlink, GateLimits(body=1000)) as gate:
        path = "/v1/fleet/push-object"
        assert post(folder, gate.port, path, b"x" * 1000)[0] != 413
        assert post(folder, gate.port, path, b"x" * 1001)[0] == 413
        # So is one that does not say how long it will be.
        chunks = (b"x" * 400 for _ in range(3))
        assert post(folder, gate.port, path, chunks)[0] == 413
        assert gate.counts()["too_large"] == 2
        assert gate.counts()["forwarded"] == 1


@pytest.mark.parametrize(("sender", "status"), [(7, 403), (5, 401)], ids=["another", "its own"])
def test_a_reply_in_the_name_of_another_device_is_refused(
    folder: FleetFolder, superlink: SuperLink, sender: int, status: int
) -> None:
    request = PushMessagesRequest(node=Node(node_id=5))
    request.messages_list.add().metadata.src_node_id = sender
    with open_gate(folder, superlink) as gate:
        body = request.SerializeToString()
        found, _ = post(folder, gate.port, "/v1/fleet/push-messages", body)
        assert found == status  # without a key that is known, the SuperLink refuses
        assert gate.counts()["forged"] == (status == 403)


def test_a_device_that_asks_too_often_waits(folder: FleetFolder, superlink: SuperLink) -> None:
    # Ten seconds' worth come at once: five requests, and hardly another one during the test.
    with open_gate(folder, superlink, GateLimits(request_rate=0.5)) as gate:
        path = "/v1/fleet/pull-messages"
        mine = {"flwr-public-key": base64.b64encode(b"mine").decode()}
        found = [post(folder, gate.port, path, headers=mine) for _ in range(8)]
        assert [status for status, _ in found[:5]] == [401] * 5
        assert found[-1][0] == 429
        assert int(found[-1][1]["retry-after"]) >= 1
        # Another key is another device.
        assert post(folder, gate.port, path, headers={"flwr-public-key": "b3RoZXI="})[0] == 401
        assert gate.counts()["too_many"] == sum(status == 429 for status, _ in found)


def test_a_device_that_sends_too_much_waits(folder: FleetFolder, superlink: SuperLink) -> None:
    limits = GateLimits(body=1000, byte_rate=1.0)  # four bodies at once, then a byte a second
    with open_gate(folder, superlink, limits) as gate:
        path = "/v1/fleet/push-object"
        found = [post(folder, gate.port, path, b"x" * 1000)[0] for _ in range(6)]
        assert found[0] != 429
        assert found[-1] == 429


def test_new_keys_do_not_help_one_address(folder: FleetFolder, superlink: SuperLink) -> None:
    limits = GateLimits(request_rate=0.2, devices_of_address=2)
    with open_gate(folder, superlink, limits) as gate:
        found = [
            post(folder, gate.port, "/v1/fleet/pull-messages", headers={"flwr-public-key": f"{n}"})
            for n in range(7)
        ]
        assert [status for status, _ in found[:4]] == [401] * 4
        assert found[-1][0] == 429


def test_connections_are_limited(folder: FleetFolder, superlink: SuperLink) -> None:
    authority = ssl.create_default_context(cafile=str(folder.authority))
    with open_gate(folder, superlink, GateLimits(connections=2)) as gate, ExitStack() as held:
        for _ in range(4):
            plain = socket.create_connection(("127.0.0.1", gate.port), timeout=10)
            held.enter_context(authority.wrap_socket(plain, server_hostname="127.0.0.1"))
        until(lambda: gate.counts()["crowded"] == 2)


def test_limits_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(Refusal, match=r"GateLimits\.body.*\n.*GateLimits\.connections"):
        GateLimits(body=0, connections=-1)
    assert GateLimits.for_message(1 << 30).body > 1 << 30


def test_a_port_in_use_is_told(folder: FleetFolder, superlink: SuperLink) -> None:
    with pytest.raises(LinkError, match=f"cannot listen on 127.0.0.1, port {superlink.port}"):
        Gate(folder, superlink.address, listen=("127.0.0.1", superlink.port))


# --- the SuperLink ----------------------------------------------------------------------------


def test_files_of_the_superlink_are_private(folder: FleetFolder, superlink: SuperLink) -> None:
    assert folder.database.exists()
    assert folder.log.exists()
    assert list(folder.exposed()) == []


def test_one_server_at_a_time(folder: FleetFolder, superlink: SuperLink) -> None:
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        SuperLink(folder)
    assert superlink.pid is not None


def test_a_superlink_that_dies_comes_back(folder: FleetFolder, superlink: SuperLink) -> None:
    before, restarts = superlink.pid, superlink.restarts
    assert before is not None
    with open_gate(folder, superlink) as gate:
        os.kill(before, signal.SIGKILL)
        until(lambda: superlink.restarts > restarts)
        status, headers = post(folder, gate.port, "/v1/fleet/pull-messages")
        assert (status, "retry-after" in headers) == (503, True)
        assert gate.counts()["unreachable"] == 1
        assert superlink.wait(30)
        assert superlink.pid not in (None, before)
        assert post(folder, gate.port, "/v1/fleet/pull-messages")[0] == 401


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next server ends it")
def test_a_superlink_does_not_outlive_a_killed_server(tmp_path: Path) -> None:
    folder = fleet_at(tmp_path / "fleet")
    reader, writer = os.pipe()
    server = os.fork()  # a new interpreter would import torch first
    if server == 0:
        try:
            os.write(writer, f"{SuperLink(folder).start().pid}\n".encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as said:
        child = psutil.Process(int(said.readline()))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    child.wait(10)


def test_an_orphan_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    folder = fleet_at(tmp_path / "fleet")
    with subprocess.Popen(["sleep", "60"]) as left:
        began = psutil.Process(left.pid).create_time()
        folder.pid.write_text(f'{{"pid": {left.pid}, "began": {began - 100}}}')
        assert not end_orphan(folder)  # another process has got its id since
        assert left.poll() is None
        folder.pid.write_text(f'{{"pid": {left.pid}, "began": {began}}}')
        assert end_orphan(folder)
        assert not psutil.pid_exists(left.pid)
    assert not folder.pid.exists()
    folder.pid.write_text("nonsense")
    assert not end_orphan(folder)


def test_a_superlink_that_cannot_start_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyfleet.deployment.superlink._ATTEMPTS", 1)
    folder = fleet_at(tmp_path / "fleet")
    folder.secret.write_bytes(b"")
    with pytest.raises(LinkError, match=r"does not answer on .*superlink\.log"):
        SuperLink(folder).start()
    SuperLink(folder).close()  # the folder is free again
